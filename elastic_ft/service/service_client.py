"""``elastic_ft.Client``: the service's verbs, in Python. The standard library alone."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from elastic_ft.config import parse_yaml
from elastic_ft.config.job_file import FILE_BYTES_MAX, check_size
from elastic_ft.core.sharing.asks import ENDED
from elastic_ft.errors import ConfigError, ElasticError, JobFailed
from elastic_ft.service import told_answers
from elastic_ft.service.access import read_token
from elastic_ft.service.service_address import opener_of, scheme_of
from elastic_ft.service.told_answers import fits

DEFAULT_URL = "http://127.0.0.1:8266"
VARIABLE = "ELASTIC_FT_SERVICE"
TOKEN_VARIABLE, CA_VARIABLE = "ELASTIC_FT_TOKEN_FILE", "ELASTIC_FT_CA_FILE"
TIMEOUT_S = 60.0
AWAY_S = 30.0  # a service that was killed is back by then
TOLD_S = 1.0  # of its absence, before it is said that one waits
SLOW_S = 5.0  # of its silence, before that is said
AGAIN_S, AGAIN_MAX_S = 0.3, 60.0
DOUBT_S = 600.0  # a submission that may have been taken in is asked about
HELD_S = 10.0  # who still says something on a stream after that is not away
AWAY, AWAY_BEHIND = (429, 503), (502, 504)  # of a service, and of a proxy before one
ANSWER_MAX, ANSWER_WITHIN_S, REFUSAL_MAX = 1 << 28, 600.0, 1 << 20  # bytes, and in which time
LINE_MAX = 1 << 24  # bytes, of a stream
PAGE = 500  # jobs that are asked for at a time
SUBMITTED_TWICE = "look at the jobs before you submit it again"
DONE_ALL_THE_SAME = "it may be done all the same"


class ServiceAway(ElasticError):
    """Nobody answers at the service's address, or who does can do nothing now.

    Attributes:
        in_doubt: it may be done later.
        again_s: it is to be asked again no sooner.
        is_lost: what was asked has come there, and no answer to it.
        is_silent: somebody takes connections there, and says nothing.
    """

    in_doubt = is_lost = is_silent = False
    again_s = 0.0


class Client:
    """Of the service at ``url``: by default of ELASTIC_FT_SERVICE, or this machine's.

    Every method raises ConfigError where what was asked for makes no sense or is refused, one line;
    ServiceAway where nobody answers.

    Args:
        token_file: where the service asks for one; by default ELASTIC_FT_TOKEN_FILE.
        ca_file: whose certificates count, beside the system's; by default ELASTIC_FT_CA_FILE.
        away_s: for so long a service that does not answer is asked again.
        waiting: told in words, once each time, that this is being done.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        token_file: str | Path | None = None,
        ca_file: str | Path | None = None,
        away_s: float = AWAY_S,
        waiting: Callable[[str], object] | None = None,
    ) -> None:
        self.url = (url or os.environ.get(VARIABLE) or DEFAULT_URL).rstrip("/")
        self.away_s = away_s
        self._waiting, self._has_told = waiting, False
        if scheme_of(self.url) not in ("http", "https"):
            raise ConfigError(f"--service: expected http://host:port, found {self.url!r:.200}")
        token_file = token_file or os.environ.get(TOKEN_VARIABLE)
        self._token = read_token(Path(token_file)) if token_file else ""
        ca_file = ca_file or os.environ.get(CA_VARIABLE)
        self._opener = opener_of(self.url, ca_file)

    def submit(
        self,
        job: str | Path | Mapping[str, Any],
        *,
        priority: int = 0,
        queue: str = "default",
        name: str | None = None,
    ) -> dict[str, Any]:
        """Returns ``{"id", "page"}``. ``job``: its file, or its values. Submitted once, however
        often the service has to be asked."""
        values = _sendable(job, "job") if isinstance(job, Mapping) else _read(Path(job))
        asked = {"job": values, "priority": priority, "queue": queue, "request": uuid.uuid4().hex}
        if name is not None:
            asked["name"] = name
        return self._call("POST", "jobs", asked, kind=told_answers.SUBMITTED)

    def jobs(
        self,
        all: bool = False,
        *,
        states: Iterable[str] = (),
        limit: int | None = None,
        after: str | None = None,
        before: str | None = None,
    ) -> list[dict[str, Any]]:
        """Those that have not ended; ``all``: those that have, too; ``states``: of these states.
        In the order of their submission.

        ``limit``: so many at most, up to 1,000: the first of those submitted after job ``after``,
        or the last of those before job ``before``; "": the last of all.
        """
        found: list[dict[str, Any]] = self._page(all, states, limit, after, before)["jobs"]
        return found

    def job_pages(
        self, all: bool = False, *, states: Iterable[str] = (), limit: int | None = None
    ) -> Iterator[list[dict[str, Any]]]:
        """As ``jobs``, ``limit`` at a time: of thousands the first are there at once."""
        after, states = None, tuple(states)
        while True:
            found = self._page(all, states, limit or PAGE, after, None)
            if found["jobs"]:
                yield found["jobs"]
            if not found.get("more"):  # a service of the release before has told all of them
                return
            after = found["jobs"][-1]["id"]

    def _page(
        self,
        all: bool,
        states: Iterable[str],
        limit: int | None,
        after: str | None,
        before: str | None,
    ) -> dict[str, Any]:
        asked = {
            "all": "1" if all else None,
            "state": ",".join(states) or None,
            "limit": limit,
            "after": after,
            "before": before,
        }
        given = {name: value for name, value in asked.items() if value is not None}
        path = "jobs" + (f"?{urllib.parse.urlencode(given)}" if given else "")
        return self._call("GET", path, kind=told_answers.JOBS)

    def status(self, job: str) -> dict[str, Any]:
        return self._call("GET", _of(job), kind=told_answers.WHOLE_JOB)

    def stop(self, job: str, now: bool = False) -> dict[str, Any]:
        """Asks for it: with a checkpoint at its next step, or at once."""
        return self._change(job, "stop", {"now": now})

    def resize(self, job: str, workers: int) -> dict[str, Any]:
        """No more than so many workers from now on."""
        return self._change(job, "resize", {"workers": workers})

    def set_priority(self, job: str, priority: int) -> dict[str, Any]:
        return self._change(job, "priority", {"priority": priority})

    def wait(self, job: str, timeout_s: float | None = None) -> dict[str, Any]:
        """Returns the job once it has ended. Raises JobFailed after ``timeout_s``."""
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while (found := self.status(job))["state"] not in ENDED:
            if until_s is not None and time.monotonic() > until_s:
                raise JobFailed(f"{job}: {found['state']} after {timeout_s:g} s")
            time.sleep(AGAIN_S)
        return found

    def events(self, job: str, follow: bool = False) -> Iterator[dict[str, Any]]:
        """Lines of the run's journal, with ``text``, the same in words."""
        return self._lines(job, "events", follow)

    def steps(self, job: str, follow: bool = False) -> Iterator[dict[str, Any]]:
        """Committed steps."""
        return self._lines(job, "steps", follow)

    def logs(self, job: str, follow: bool = False) -> Iterator[str]:
        """What the job's processes print, line by line."""
        for line in self._lines(job, "logs", follow):
            yield str(line["text"])

    def service(self) -> dict[str, Any]:
        """Who it is, its nodes and queues."""
        return self._call("GET", "service", kind=told_answers.SERVICE)

    def stop_service(self, jobs: str = "keep") -> None:
        """``jobs``: "keep" leaves them to the cluster, "stop" stops them first."""
        asked, kind = {"jobs": jobs}, told_answers.STOPPED
        self._call("POST", "service/stop", asked, timeout_s=600.0, kind=kind)

    # ----------------------------------------------------------------------------------- the wire

    def _change(self, job: str, what: str, asked: dict[str, Any]) -> dict[str, Any]:
        return self._call("POST", _of(job, what), asked, kind=told_answers.WHOLE_JOB)

    def _call(
        self,
        verb: str,
        path: str,
        body: Any = None,
        timeout_s: float = 0.0,
        kind: Any = dict,
    ) -> dict[str, Any]:
        """``kind``: of the answer (``told_answers``). Raises ConfigError where it is none."""
        timeout_s = timeout_s or TIMEOUT_S
        until_s, doubt = time.monotonic() + self.away_s, ""
        while True:
            try:
                with (
                    self._telling(),
                    self._open(verb, path, body, timeout_s) as answer,
                ):
                    content = _whole(answer)
                break
            except (ServiceAway, OSError, http.client.HTTPException) as error:
                away = self._away(error)
            if verb == "POST" and (away.in_doubt or away.is_lost) and not doubt:
                doubt = SUBMITTED_TWICE if path == "jobs" else DONE_ALL_THE_SAME
                if self.away_s and path == "jobs":
                    until_s = time.monotonic() + self._asks_on_s(away)
            self._rest(until_s, ServiceAway(f"{away}; {doubt}") if doubt else away)
        self._has_told = False
        with contextlib.suppress(ValueError, RecursionError):
            if len(content) <= ANSWER_MAX and fits(found := json.loads(content), kind):
                return dict(found)
        raise self._stranger()

    def _asks_on_s(self, away: ServiceAway) -> float:
        """For how long a submission is asked about that may have been taken in."""
        asks_s = DOUBT_S if away.in_doubt else self.away_s
        self._tell(f"{away}; asking, {asks_s:g} s at most, whether it was done")
        return asks_s

    def _away(self, error: Exception) -> ServiceAway:
        if isinstance(error, ServiceAway):
            return error
        is_lost = not isinstance(error, urllib.error.URLError)  # which is: it could not be sent
        if is_lost and isinstance(error, TimeoutError):
            away = ServiceAway(f"who listens at {self.url} does not answer: it may stand still")
            away.is_silent = True
        else:
            why = str(getattr(error, "reason", error)) or type(error).__name__
            away = ServiceAway(f"no service answers at {self.url}: {why}")
        away.is_lost = is_lost
        return away

    def _rest(self, until_s: float, error: ServiceAway) -> None:
        """Before it is asked again. Raises ``error`` where that has been done for long enough."""
        left_s = until_s - time.monotonic()
        if left_s < error.again_s:
            raise error from None
        if self.away_s - left_s > TOLD_S:
            self._tell(f"waiting for the service at {self.url}, {self.away_s:g} s at most")
        time.sleep(max(AGAIN_S, error.again_s))

    def _tell(self, line: str) -> None:
        if self._waiting is not None and not self._has_told:
            self._has_told = True
            self._waiting(line)

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """An answer that is long in coming."""
        if self._waiting is None or self._has_told:
            yield
            return
        line = f"waiting for an answer of the service at {self.url}"
        timer = threading.Timer(SLOW_S, self._tell, [line])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _open(
        self, verb: str, path: str, body: Any, timeout_s: float, last_id: int | None = None
    ) -> Any:
        """Raises ServiceAway, ConfigError."""
        headers = {"Accept": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        if last_id is not None:
            headers["Last-Event-ID"] = str(last_id)
        if body is not None:
            headers["Content-Type"] = "application/json"
        content = None if body is None else json.dumps(body).encode()
        url = f"{self.url}/api/v1/{path}"
        request = urllib.request.Request(url, content, headers, method=verb)
        try:
            return self._opener.open(request, timeout=timeout_s)
        except urllib.error.HTTPError as error:
            raise self._refused(error) from None
        except (OSError, http.client.HTTPException) as error:
            raise self._away(error) from None

    def _refused(self, error: urllib.error.HTTPError) -> ElasticError:
        found = _refusal_of(error)
        said = found.get("error")
        if error.code in AWAY or (said is None and error.code in AWAY_BEHIND):
            silent = f"no service answers at {self.url}: HTTP {error.code}"
            away = ServiceAway(silent if said is None else str(said))
            away.in_doubt = found.get("in_doubt") is True
            away.again_s = _again_s(error.headers.get("Retry-After"))
            return away
        return self._stranger(f": HTTP {error.code}") if said is None else ConfigError(str(said))

    def _lines(self, job: str, kind: str, follow: bool) -> Iterator[dict[str, Any]]:
        """Of a stream: after a service that was killed it goes on where it was."""
        if not follow:
            wanted = {kind: [told_answers.LINE[kind]]}
            yield from self._call("GET", _of(job, f"{kind}?follow=0"), kind=wanted)[kind]
            return
        last_id: int | None = None
        until_s: float | None = None  # from when it broke off: nothing new came since
        while True:
            try:
                with self._stream(_of(job, kind), last_id) as answer:
                    opened_s = time.monotonic()
                    for event, id, data in self._sent(answer):
                        if event == "end":
                            return
                        is_new = event == "message" and id != last_id
                        if is_new or time.monotonic() - opened_s > HELD_S:
                            until_s, self._has_told = None, False
                        if event == "message":
                            if not fits(data, told_answers.LINE[kind]):
                                raise self._stranger()
                            last_id = id
                            yield data
                    error = ServiceAway(f"the stream from {self.url} ends before the job does")
            except (ServiceAway, OSError, http.client.HTTPException) as broken:
                error = self._away(broken)
            until_s = until_s or time.monotonic() + self.away_s
            self._rest(until_s, error)

    def _stream(self, path: str, last_id: int | None) -> Any:
        with self._telling():
            return self._open("GET", path, None, TIMEOUT_S, last_id)

    def _sent(self, answer: Any) -> Iterator[tuple[str, int, Any]]:
        """Raises ConfigError."""
        try:
            yield from _server_sent(answer)
        except (ValueError, RecursionError):
            raise self._stranger() from None

    def _stranger(self, more: str = "") -> ConfigError:
        what = "is no service of elastic_ft"
        return ConfigError(f"--service: who answers at {self.url} {what}{more}")


def _server_sent(answer: Any) -> Iterator[tuple[str, int, Any]]:
    """Event, id and data; "" for a comment, by which the service says that it is still here."""
    event, id, data = "message", 0, ""
    for line in iter(lambda: answer.readline(LINE_MAX), b""):
        name, _, value = line.decode().rstrip("\r\n").partition(": ")
        if line.startswith(b":"):
            yield "", 0, None
        elif name == "event":
            event = value
        elif name == "id":
            id = int(value)
        elif name == "data":
            data = value
        elif not name and data:
            yield event, id, json.loads(data)
            event, data = "message", ""


def _of(job: str, what: str = "") -> str:
    name = urllib.parse.quote(job, safe="", errors="surrogateescape")
    return f"jobs/{name}" + (f"/{what}" if what else "")


def _whole(answer: Any) -> bytes:
    """Of one that comes drop by drop, or has no end, no more than counts. Raises OSError."""
    content, until_s = bytearray(), time.monotonic() + ANSWER_WITHIN_S
    while len(content) <= ANSWER_MAX and (piece := answer.read1(1 << 20)):
        content += piece
        if time.monotonic() > until_s:
            raise OSError(f"its answer has no end after {ANSWER_WITHIN_S:g} s")
    if answer.length and len(content) <= ANSWER_MAX:
        raise http.client.IncompleteRead(bytes(content), answer.length)
    return bytes(content)


def _refusal_of(error: urllib.error.HTTPError) -> dict[str, Any]:
    with contextlib.suppress(ValueError, RecursionError, OSError, http.client.HTTPException):
        if isinstance(found := json.loads(error.read(REFUSAL_MAX)), dict):
            return found
    return {}


def _again_s(said: str | None) -> float:
    """Seconds. A service says no more than a minute; a date, as others may, is none of its own."""
    return min(float(said), AGAIN_MAX_S) if said and said.isdecimal() else 0.0


def _read(path: Path) -> Any:
    """Raises ConfigError."""
    try:
        with path.open("rb") as file:
            return _sendable(parse_yaml(file.read(FILE_BYTES_MAX + 1), str(path)), str(path))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def _sendable(values: Any, where: str) -> Any:
    """Raises ConfigError where a value is one that JSON does not have, a date, say."""
    check_size(values, where)
    try:
        json.dumps(values)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: not a job: {error}") from None
    return values
