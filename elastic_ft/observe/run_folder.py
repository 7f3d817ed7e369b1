"""The run folder (DESIGN section 7): what a run did, readable from outside while it runs.

Lines are appended and flushed as they happen. A folder under a remote URL is written locally and
mirrored, its growing files in segments (``observe.segments``): object stores have no append.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, BinaryIO

import yaml

from elastic_ft.config import parse_yaml
from elastic_ft.errors import ConfigError, ElasticError, StoreFailed, Superseded, redacted
from elastic_ft.observe import files, requests, scratch, segments
from elastic_ft.observe.alive import NAME as ALIVE
from elastic_ft.observe.inbox_file import InboxFile
from elastic_ft.observe.lines import count_lines, local_path
from elastic_ft.observe.run_reader import last_generation, read_lines
from elastic_ft.storage import owners
from elastic_ft.storage.cancellable import CancellableStore
from elastic_ft.storage.store import if_there, open_store

__all__ = ["RunFolder", "count_lines", "last_generation", "read_lines"]

log = logging.getLogger(__name__)
MIRROR_EVERY_S = 5.0
STORE_S = 60.0  # for each call
HEARING_S = 5.0  # to be told what is asked: a store that is back is asked again
MIRROR_BYTES_PER_S = 4 << 20  # at most, on average
RESULT_AWAY_S, RESULT_AGAIN_S = 600.0, 2.0  # a complete job's result waits for its store
SEGMENTS_MAX = dict.fromkeys(segments.NUMBERS, segments.SEGMENT_BYTES)
SEGMENTS_MAX["inbox.jsonl"] = 256 << 10  # it is mirrored twice a second
RECORD = ("ledger.jsonl", "steps.jsonl")  # in this order: a step line has its samples
# Files that go up together are of one moment.
UPLOADS_INBOX = ("inbox.jsonl",)
BEFORE_SNAPSHOT = ("job.yaml", "events.jsonl", *RECORD)  # an inbox begun anew is of no use without
UPLOADS = (("job.yaml",), ("events.jsonl",), RECORD, UPLOADS_INBOX, ("result.json",))
REPORT = ("report.html",)
FILES = (*(name for names in UPLOADS for name in names), ALIVE)


class RunFolder(InboxFile, requests.Requested):
    """Attributes:
    path: the local folder.
    url: what the user named: the same, or a remote URL it is mirrored to (``is_remote``).
    hurried: someone asks to stop."""

    def __init__(self, url: str, segment_bytes: int = segments.SEGMENT_BYTES) -> None:
        super().__init__()
        self.url = url.rstrip("/")
        self._store = CancellableStore(self.url, STORE_S)
        self._hearing = open_store(self.url, deadline_s=HEARING_S)
        folder = local_path(self.url)
        self.is_remote = folder is None
        self.path = folder or scratch.make("elastic_ft_run_")
        self.path.mkdir(parents=True, exist_ok=True)
        self._uploading, self._beginning = threading.Lock(), threading.Lock()
        self._sent_bytes = 0
        self._stop_mirror, self._look_now = threading.Event(), threading.Event()
        self._mirrored: dict[str, files.Stamp] = {}
        self._mirrors = {
            name: segments.Mirror(self._store, name, self._check_claim, min(segment_bytes, most))
            for name, most in SEGMENTS_MAX.items()
        }
        self._claim: owners.Claim | None = None
        self._superseded: Superseded | None = None
        self._has_result = self._is_complete = self.hurried = self._is_begun = False
        self._threads: list[threading.Thread] = []
        self._removed: set[str] = set()  # here, and not there yet
        self.mirror_error = ""

    def hurry(self) -> None:
        """Someone asks to stop. From any thread. Who takes this over waits no more: StoreFailed."""
        with self._beginning:
            self.hurried = True
            if not self._is_begun:
                self._store.deadline_s = HEARING_S
                self._store.break_off()

    def make_durable(self) -> None:
        """What is recorded of steps outlasts this machine from now on. From any thread.

        Raises StoreFailed, OSError; Superseded.
        """
        self.flush()
        (self._upload if self.is_remote else self._sync)(RECORD)

    def _sync(self, names: Sequence[str]) -> None:
        for name in names:
            if (self.path / name).exists():
                files.sync(self.path / name)
        files.sync(self.path)

    def _before_snapshot(self) -> None:
        if not self.is_remote:  # else it goes up after them (``_upload``)
            self._sync(BEFORE_SNAPSHOT)

    def take_over(self, run: str, job: str, renamed: bool = False) -> tuple[str, ...]:
        """This is controller ``run``'s now. Returns the runs here that did not end.

        Of a remote folder, what they left is fetched now, and mirrored from now on. If one of
        them lives it ends by ``check_owner``, without another line here. Raises UsageError where
        this is another job's folder, unless that was ``renamed``; StoreFailed, after which it may
        be called again.
        """
        if self._claim is None:
            self._claim = owners.take_over(
                self._store, job=job, run=run, run_folder=self.url, renamed=renamed
            )
        if self.is_remote:
            self._fetch()
        with self._beginning:
            self._is_begun, self._store.deadline_s = True, STORE_S
        if self.is_remote:
            works = (self._mirror_always, self._attend_always)
            self._threads = [threading.Thread(target=work, daemon=True) for work in works]
            for thread in self._threads:
                thread.start()
        else:
            segments.join_copies(self.path, files.replace)
        self._count()
        return self._claim.unended

    def _count(self) -> None:
        self._sequence = count_lines(self.path / "events.jsonl")
        self._count_inbox()

    # ----------------------------------------------------------------- writing

    def write_job(self, job: dict[str, Any]) -> None:
        """Readable for its owner alone: kwargs and data URLs may be private."""
        files.replace(self.path / "job.yaml", yaml.safe_dump(job, sort_keys=False).encode())

    def recorded_job(self) -> dict[str, Any]:
        """The job of the run before this one; {} if there was none, or it can't be read."""
        try:
            values = parse_yaml((self.path / "job.yaml").read_bytes(), "job.yaml")
        except (OSError, ConfigError):
            return {}
        return values if isinstance(values, dict) else {}

    def journal(
        self, at_s: float, event: str, generation: int, reason: str, fields: dict[str, Any]
    ) -> dict[str, Any]:
        """Appends one line to events.jsonl and returns it (I8)."""
        with self._lock:
            line = {"at_s": round(at_s, 6), "seq": self._sequence, "generation": generation}
            line |= {"event": event, "reason": redacted(reason), **fields}
            self._sequence += 1
            self._append("events.jsonl", line)
        return line

    def make_up(self, line: dict[str, Any]) -> None:
        """Appends a line of the journal that was decided before, and not written."""
        with self._lock:
            reason = redacted(line["reason"])
            self._append("events.jsonl", line | {"seq": self._sequence, "reason": reason})
            self._sequence += 1

    def make_inbox_durable(self) -> None:
        """What was told so far is where the next controller can read it. From any thread.

        Raises StoreFailed, OSError; Superseded.
        """
        self.flush()
        if self.is_remote:
            self._upload(UPLOADS_INBOX)
            return
        with (self.path / "inbox.jsonl").open("rb") as file:
            os.fdatasync(file.fileno())

    def rewrite(self, name: str, content: bytes) -> None:
        """In a file of its own: what another controller may yet append goes to the old one.

        Raises Superseded, and then nothing is replaced: one that was stopped while it began, too.
        """
        with self._lock:
            self._close_file(name)
            files.replace(self.path / name, content, self.check_owner)
            self._replaced[name] += 1

    def record_step(self, line: dict[str, Any], sample_ids: list[int] | None) -> None:
        """Appends a committed step, after its ledger line: a step line has its samples."""
        with self._lock:
            if sample_ids is not None:
                audit = {"step": line["step"], "generation": line["generation"]}
                self._append("ledger.jsonl", audit | {"samples": sample_ids})
            self._append("steps.jsonl", line)

    @property
    def _run(self) -> str | None:
        return self._claim.owner.run if self._claim is not None else None

    @property
    def unended(self) -> tuple[str, ...]:
        """The runs before this one that had this folder and did not end."""
        return self._claim.unended if self._claim is not None else ()

    def forget_ended(self) -> str:
        """Of the runs that did not end, the journal has been told. Returns what went wrong: then
        the next controller is told of them, too, and no job ends for that."""
        try:
            for run in self._claim.unended if self._claim is not None else ():
                self._claim.ended(run)
        except StoreFailed as error:
            return f"the end of an earlier run is not noted: {error}"
        return ""

    def check_owner(self) -> None:
        """Raises Superseded if another has taken this folder over, or did and ended.

        Of a remote folder, once the mirror has seen it: until then nothing left this machine.
        """
        if self._superseded is not None:
            raise self._superseded
        if self._claim is None or self.is_remote:
            return
        if (self.path / self._claim.next_key).exists():  # no more than a stat before each line
            self._claim.check()

    @property
    def is_ours(self) -> bool:
        """It was taken over, and by nobody since."""
        try:
            self.check_owner()
        except Superseded:
            return False
        return self._claim is not None

    def last_step(self) -> int:
        """The last step recorded; 0 if none is."""
        return int(self.last_line().get("step", 0))

    def last_line(self) -> dict[str, Any]:
        """Of steps.jsonl; {} if it has none."""
        return next(reversed(read_lines(self.path / "steps.jsonl")), {})

    def computed_by(self) -> dict[int, int]:
        """Of the steps recorded, the generation that computed each."""
        return {e["step"]: e["generation"] for e in read_lines(self.path / "steps.jsonl")}

    def truncate(self, step: int) -> None:
        """Voids the lines of steps after ``step``, and torn last lines. Where steps are voided the
        whole file stays beside it, as ``steps.<n>.jsonl``: the last few."""
        with self._lock:
            for name in ("steps.jsonl", "ledger.jsonl"):
                self._close_file(name)
                if (self.path / name).exists():
                    files.void_after(self.path / name, step, self.check_owner)
                    self._replaced[name] += 1

    def repair(self) -> None:
        """Drops a torn last line of the journals, left by a controller that died writing."""
        with self._lock:
            for name in ("events.jsonl", "inbox.jsonl"):
                dropped = files.drop_torn_line(self.path / name, self.check_owner)
                if dropped and name in self._replaced:
                    self._replaced[name] += 1
            self._count()

    def write_result(self, result: dict[str, Any]) -> None:
        self.check_owner()
        text = json.dumps(files.finite(result), indent=2) + "\n"
        files.replace(self.path / "result.json", text.encode())
        self._has_result, self._is_complete = True, result.get("status") == "completed"

    def close(self) -> None:
        with self._lock:
            for name in list(self._files):
                self._close_file(name)
        self._stop_mirror.set()
        self._look_now.set()
        for thread in self._threads:
            thread.join(60)
        if self._threads:
            self._mirror_whole()
        if self._has_result and self._claim is not None and not self.mirror_error:
            with contextlib.suppress(StoreFailed):  # the next start says that this one was killed
                self._claim.ended()
        if self.is_remote and (not self.mirror_error or self._superseded is not None):
            shutil.rmtree(self.path, ignore_errors=True)

    # --------------------------------------------------------------- requests

    def drop_request(self) -> None:
        """The job has ended: nobody is to obey it any more."""
        for name in requests.NAMES:
            self._remove(name)

    def forget_result(self) -> None:
        """An earlier run's is not this one's."""
        for name in ("result.json", *REPORT):
            self._remove(name)

    def _remove(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)
        if self.is_remote:  # by the mirror: its store may be away, and nobody waits here
            self._removed.add(name)
            self._look_now.set()

    def _delete_removed(self) -> None:
        """Of a request: the next start would obey it. Raises StoreFailed, Superseded."""
        for name in tuple(self._removed):
            self._check_claim()
            if name in requests.NAMES or not (self.path / name).exists():
                self._store.delete(name)
            self._removed.discard(name)

    # --------------------------------------------------------------- mirroring

    def _fetch(self) -> None:
        requests.fetch(self._store, self.path)
        for name in FILES:
            if (content := self._get(name)) is not None:
                (self.path / name).write_bytes(content)

    def _get(self, name: str) -> bytes | None:
        """None if the remote folder has no such file. Raises StoreFailed."""
        mirror = self._mirrors.get(name)
        return if_there(mirror.fetch if mirror is not None else partial(self._store.get, name))

    def _mirror_always(self) -> None:
        while self._superseded is None:
            self._look_now.wait(self.pause_s())
            self._look_now.clear()
            if self._stop_mirror.is_set():
                return
            self._mirror()

    def pause_s(self) -> float:
        """Until the mirror's next look, in which it sends no more than its rate allows."""
        return max(MIRROR_EVERY_S, self._sent_bytes / MIRROR_BYTES_PER_S)

    def _mirror(self) -> None:
        """Uploads what has grown or changed. A failure is kept for the report and retried."""
        self.mirror_error, self._sent_bytes = "", 0
        with self._noting_trouble():
            for names in (*UPLOADS, REPORT):
                self._upload(names)
            self._delete_removed()

    def _mirror_whole(self) -> None:
        """For the last time. Of a job that is complete nobody comes later to make up for it."""
        until_s = time.monotonic() + (RESULT_AWAY_S if self._is_complete else 0.0)
        self._mirror()
        if self.mirror_error and self._is_complete:
            log.warning("complete, waits for its store unless asked to stop: %s", self.mirror_error)
        while self.mirror_error and self._superseded is None:
            if time.monotonic() >= until_s or self.hurried:
                log.warning("what %s lacks is in %s: %s", self.url, self.path, self.mirror_error)
                break
            time.sleep(RESULT_AGAIN_S)
            self._mirror()

    def _attend_always(self) -> None:
        while self._superseded is None and not self._stop_mirror.wait(MIRROR_EVERY_S):
            self._attend()

    def _attend(self) -> None:
        """What others wait for, however much the mirror has to send: that this controller lives,
        that it sees what it is asked, and that it ends where another has the folder."""
        hear = partial(requests.fetch, self._hearing, self.path, self._removed)
        for each in (hear, self._check_claim, self._show):  # one that fails stops no other
            with self._noting_trouble():
                each()

    def _show(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._store.put(ALIVE, (self.path / ALIVE).read_bytes(), self._check_claim)

    @contextlib.contextmanager
    def _noting_trouble(self) -> Iterator[None]:
        try:
            yield
        except Superseded as error:  # the files there are the other's now
            self._superseded, self.mirror_error = error, str(error)
        except (ElasticError, OSError) as error:  # tried again at the next look
            self.mirror_error = str(error)

    def _upload(self, names: Sequence[str]) -> None:
        """These files as they are at one moment, in their order; of one that is replaced just then,
        the older one. Raises StoreFailed, Superseded."""
        with self._uploading, contextlib.ExitStack() as opened:
            with self._lock:
                if names == UPLOADS_INBOX and self._is_inbox_begun_anew():
                    names = (*BEFORE_SNAPSHOT, *names)
                files = [(name, self._open(name, opened)) for name in names]
            for name, file in files:
                if file is not None:
                    self._upload_one(name, *file)

    def _is_inbox_begun_anew(self) -> bool:
        """Since its last upload."""
        before = self._mirrored.get("inbox.jsonl")
        return before is None or before.replaced != self._replaced["inbox.jsonl"]

    def _open(self, name: str, opened: contextlib.ExitStack) -> tuple[BinaryIO, files.Stamp] | None:
        try:
            file = opened.enter_context((self.path / name).open("rb"))
        except FileNotFoundError:
            return None
        return file, files.stamp_of(os.fstat(file.fileno()), self._replaced.get(name, 0))

    def _upload_one(self, name: str, file: BinaryIO, stamp: files.Stamp) -> None:
        before = self._mirrored.get(name)
        if before == stamp:
            return
        if mirror := self._mirrors.get(name):
            replaced = before is None or before.replaced != stamp.replaced
            sent = mirror.upload(file, stamp.size, replaced)
        else:
            content = file.read()
            self._store.put(name, content, self._check_claim)
            sent = len(content)
        self._mirrored[name] = stamp
        self._sent_bytes += sent

    def _check_claim(self) -> None:
        if self._claim is not None:
            self._claim.check()
