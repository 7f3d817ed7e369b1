"""What a cloud's metadata server says of this machine's end. Answers in, deadlines out.

Formats: AWS "Spot Instance interruption notices" (instance-action), Google "Preemptible VM
instances" (preempted), Azure "Scheduled Events for Linux VMs" (2020-07-01).
"""

from __future__ import annotations

import email.utils
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

AWS, GCP, AZURE = "aws", "gcp", "azure"
GCP_LEFT_S = 30.0  # from the notice to the end
AZURE_ENDS = ("Preempt", "Terminate", "Redeploy", "Reboot")  # Freeze comes back as it was
MARKS = {  # of the machine's firmware, under /sys/class/dmi/id
    AWS: ("sys_vendor", "Amazon EC2"),
    GCP: ("product_name", "Google Compute Engine"),
    AZURE: ("chassis_asset_tag", "7783-7084-3265-9085-8269-3286-77"),
}


@dataclass(frozen=True, slots=True)
class PreemptionNotice:
    """``deadline_s``: unix."""

    deadline_s: float
    reason: str


def cloud_of(firmware: dict[str, str]) -> str | None:
    """``firmware``: what the files of MARKS say."""
    found = (cloud for cloud, (name, value) in MARKS.items() if firmware.get(name) == value)
    return next(found, None)


def of_aws(answer: str, now_s: float) -> PreemptionNotice | None:
    """``answer``: of spot/instance-action; "" where there is none (404). Raises ValueError."""
    if not answer:
        return None
    said = _object(answer)
    at = datetime.fromisoformat(str(said["time"]))
    at_s = at.replace(tzinfo=at.tzinfo or UTC).timestamp()
    return PreemptionNotice(at_s, f"AWS will {said.get('action', 'end')} this spot instance")


def of_gcp(answer: str, now_s: float) -> PreemptionNotice | None:
    """``answer``: of instance/preempted. Raises ValueError."""
    said = answer.strip().upper()
    if said not in ("TRUE", "FALSE"):
        raise ValueError(f"expected TRUE or FALSE, found {answer!r:.100}")
    if said == "FALSE":
        return None
    return PreemptionNotice(now_s + GCP_LEFT_S, "Google Cloud preempts this instance")


def of_azure(answer: str, machine: str, now_s: float) -> PreemptionNotice | None:
    """The first end of ``machine`` among the scheduled events, which are of all machines of its
    scale set. Raises ValueError."""
    found: list[PreemptionNotice] = []
    for event in _object(answer).get("Events", ()):
        kind = event.get("EventType")
        if kind not in AZURE_ENDS or machine not in event.get("Resources", ()):
            continue
        told = event.get("NotBefore") or ""  # empty: it has begun
        at_s = email.utils.parsedate_to_datetime(told).timestamp() if told else now_s
        found.append(PreemptionNotice(at_s, f"Azure has scheduled a {kind} of this machine"))
    return min(found, key=lambda notice: notice.deadline_s, default=None)


def _object(answer: str) -> dict[str, Any]:
    try:
        found = json.loads(answer)
        if isinstance(found, dict):
            return found
    except ValueError:
        pass
    raise ValueError(f"expected a JSON object, found {answer!r:.100}")
