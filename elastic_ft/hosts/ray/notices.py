"""Asks the cloud's metadata server whether this machine is to go, in a thread of a node's keeper.

Nothing is asked unless the job names a cloud, or the machine's firmware does.
"""

from __future__ import annotations

import logging
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from elastic_ft.keeper import preemption

log = logging.getLogger(__name__)
FIRMWARE = Path("/sys/class/dmi/id")
SERVERS = {
    preemption.AWS: "http://169.254.169.254",
    preemption.GCP: "http://metadata.google.internal",
    preemption.AZURE: "http://169.254.169.254",
}
EVERY_S = 2.0
ASK_TIMEOUT_S = 2.0
AWS_TOKEN_S = 300
AZURE_VERSION = "2020-07-01"
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def cloud_here(wish: str, firmware: Path = FIRMWARE) -> str | None:
    """``wish``: of the job file: a cloud, auto or none."""
    if wish != "auto":
        return None if wish == "none" else wish
    found: dict[str, str] = {}
    for name in {name for name, _ in preemption.MARKS.values()}:
        try:
            found[name] = (firmware / name).read_text(errors="replace").strip()
        except OSError:  # no such file in a container without it
            continue
    return preemption.cloud_of(found)


class Metadata:
    """The server of one cloud."""

    def __init__(self, cloud: str, server: str | None = None) -> None:
        self._cloud, self._server = cloud, server or SERVERS[cloud]
        self._machine = ""

    def notice(self) -> preemption.PreemptionNotice | None:
        """Raises OSError, ValueError, KeyError."""
        now_s = time.time()
        if self._cloud == preemption.AWS:
            path = "/latest/meta-data/spot/instance-action"
            return preemption.of_aws(
                self._ask(path, {"X-aws-ec2-metadata-token": self._token()}), now_s
            )
        if self._cloud == preemption.GCP:
            path = "/computeMetadata/v1/instance/preempted"
            return preemption.of_gcp(self._ask(path, {"Metadata-Flavor": "Google"}), now_s)
        metadata, version = {"Metadata": "true"}, f"api-version={AZURE_VERSION}"
        if not self._machine:
            path = f"/metadata/instance/compute/name?{version}&format=text"
            self._machine = self._ask(path, metadata).strip()
        answer = self._ask(f"/metadata/scheduledevents?{version}", metadata)
        return preemption.of_azure(answer, self._machine, now_s)

    def _token(self) -> str:
        lasts = {"X-aws-ec2-metadata-token-ttl-seconds": str(AWS_TOKEN_S)}
        return self._ask("/latest/api/token", lasts, "PUT")

    def _ask(self, path: str, headers: dict[str, str], verb: str = "GET") -> str:
        """ "" where there is no such thing. Raises OSError."""
        request = urllib.request.Request(self._server + path, headers=headers, method=verb)
        try:
            with _direct.open(request, timeout=ASK_TIMEOUT_S) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return ""
            raise


class NoticeWatch:
    """Args:
    on_notice: drains the node; asked again where it raises.
    """

    def __init__(
        self,
        metadata: Metadata,
        on_notice: Callable[[preemption.PreemptionNotice], object],
        every_s: float = EVERY_S,
    ) -> None:
        self._metadata, self._on_notice, self._every_s = metadata, on_notice, every_s
        self._trouble = ""

    def start(self) -> None:
        threading.Thread(target=self._watch, name="notices", daemon=True).start()

    def _watch(self) -> None:
        while not self._told():
            time.sleep(self._every_s)

    def _told(self) -> bool:
        """Whether a notice has come, and was passed on."""
        try:
            if (notice := self._metadata.notice()) is not None:
                log.warning("%s, in %.0f s", notice.reason, notice.deadline_s - time.time())
                self._on_notice(notice)
                return True
            self._trouble = ""
        except Exception as error:  # a broken answer, a head that is away: said once, asked again
            trouble = f"{type(error).__name__}: {error}"
            if trouble != self._trouble:
                log.warning("whether this machine is to go is not known: %s", trouble)
            self._trouble = trouble
        return False
