"""What a controller is started from: a file in the run folder, not its driver's memory.

An actor whose arguments lie with its driver can't be restarted once that is gone. So a controller
gets a URL and a digest, and reads the rest there: the job, the train loop (pickled by value, as Ray
does with arguments), configuration, callbacks. The digest is why nobody who can write to the bucket
can make a controller run something else.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import queue
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from ray import cloudpickle

from elastic_ft.config import Job
from elastic_ft.errors import JobFailed, StoreFailed
from elastic_ft.faults import PointFault
from elastic_ft.hosts.ray.tune_trial import TuneTrial
from elastic_ft.hosts.ray.warm_standby import Standby
from elastic_ft.observe.lines import local_path
from elastic_ft.storage import owners
from elastic_ft.storage.kinds import FailureKind
from elastic_ft.storage.store import StoreError, open_store

log = logging.getLogger(__name__)
T = TypeVar("T")
NAME = "submission-{}.pickle"
DIGITS = 16  # of the digest, in the file's name
STARTS_MAX, EARLY_S = 10, 20.0  # of controllers, of which each ends so soon after its start
READ_AGAIN_S = 1.0
NOTE_DEADLINE_S = 10.0
READ_TIMEOUT_S = 600.0  # a store that is away for a while costs no job its controller


class ByValue(Generic[T]):
    """Stands in for Ray Train's reference to an object: a reference needs its owner."""

    def __init__(self, value: T) -> None:
        self._value = value

    def get(self) -> T:
        return self._value


@dataclass(frozen=True)
class Submission:
    """Attributes:
    run_url: the run folder; an earlier run in it is continued.
    prefix: of the names of all that the run has on its cluster.
    trainer: what Ray Train's controller takes.
    standby: what to keep ready for the next controller.
    trial: of Ray Tune's, with which the job is to end.
    """

    job: Job
    run_url: str
    checkpoint_url: str
    prefix: str
    faults: tuple[PointFault, ...]
    accept_changes: bool
    trainer: dict[str, Any]
    standby: Standby | None = None
    trial: TuneTrial | None = None


@dataclass(frozen=True, slots=True)
class Submitted:
    """Where a submission is: all that an actor needs."""

    run_url: str
    digest: str

    @property
    def name(self) -> str:
        return NAME.format(self.digest[:DIGITS])

    @property
    def delivered_name(self) -> str:
        """Of the file with the number of the last round of reports that is delivered."""
        return f"{self.name}.delivered"


def write_submission(submission: Submission) -> Submitted:
    """Writes it, for this user's eyes alone where that is a folder. Raises StoreFailed, OSError."""
    content = cloudpickle.dumps(submission)
    submitted = Submitted(submission.run_url, hashlib.sha256(content).hexdigest())
    folder = local_path(submission.run_url)
    if folder is None:
        open_store(submission.run_url).put(submitted.name, content)
        return submitted
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / submitted.name
    swap = path.with_suffix(".tmp")
    swap.unlink(missing_ok=True)
    with os.fdopen(os.open(swap, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
    swap.replace(path)
    return submitted


def read_submission(submitted: Submitted) -> Submission:
    """Raises JobFailed where it is another one, or none; StoreFailed where that can't be told."""
    content = _content(submitted)
    if hashlib.sha256(content).hexdigest() != submitted.digest:
        raise JobFailed(f"{submitted.run_url}/{submitted.name} is not what was submitted")
    submission = cloudpickle.loads(content)
    assert isinstance(submission, Submission)
    return submission


def has_begun(run_url: str) -> bool:
    """Whether a run has begun in this very folder; True of a URL, the same on every machine.

    Raises StoreFailed; StorageError where its owner's object can't be understood.
    """
    folder = local_path(run_url)
    if folder is None or any(folder.glob(NAME.format("*"))):
        return True
    return owners.newest(open_store(run_url))[0] is not None


class Starts:
    """Of controllers: where one after another ends early, so would the next. One under which a step
    was committed did not end for that: it is counted from the next one on."""

    def __init__(self, submitted: Submitted) -> None:
        self._submitted, self._name = submitted, f"{submitted.name}.starts"
        self._forgetting: threading.Thread | None = None

    def count(self) -> None:
        """This one. Raises JobFailed where it is one too many.

        Where the run folder is another machine's, none is made here: ``read`` says so.
        """
        folder = local_path(self._submitted.run_url)
        if folder is not None and not folder.exists():
            return
        store = open_store(self._submitted.run_url)
        try:
            known = [float(at_s) for at_s in json.loads(store.get(self._name))]
        except (StoreFailed, ValueError):  # the first, or the store is away: it counts from here
            known = []
        known.append(time.time())
        early = 1
        while early < len(known) and known[-early] - known[-early - 1] < EARLY_S:
            early += 1
        if early > STARTS_MAX:
            raise JobFailed(
                f"{early - 1} controllers, one after another, ended within {EARLY_S:g} s, and no "
                "step was committed"
            )
        with contextlib.suppress(StoreFailed):
            store.put(self._name, json.dumps(known[-STARTS_MAX:]).encode())

    def trained(self) -> None:
        """A step was committed: should this controller end, it was not in vain. Returns at once."""
        if self._forgetting is None:
            self._forgetting = threading.Thread(target=self._forget, name="starts", daemon=True)
            self._forgetting.start()

    def _forget(self) -> None:
        with contextlib.suppress(StoreFailed):  # it counts as early, if it is
            open_store(self._submitted.run_url, deadline_s=NOTE_DEADLINE_S).delete(self._name)

    def close(self) -> None:
        """Returns once nothing is written any more, or could be soon."""
        if self._forgetting is not None:
            self._forgetting.join(NOTE_DEADLINE_S)


class DeliveredNote:
    """Notes which round of reports callbacks were given last: the next controller gives them none
    of those again. A bucket is written beside the reports, and may be some rounds behind."""

    def __init__(self, submitted: Submitted) -> None:
        self._name = submitted.delivered_name
        self._store = open_store(submitted.run_url, deadline_s=NOTE_DEADLINE_S)
        self._todo: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._writer: threading.Thread | None = None
        if local_path(submitted.run_url) is None:
            self._writer = threading.Thread(target=self._write, name="delivered", daemon=True)
            self._writer.start()

    def note(self, index: int) -> None:
        if self._writer is None:
            self._put(index)
        else:
            self._todo.put(index)

    def before(self) -> int:
        """As an earlier controller noted it; 0 if that is not known."""
        try:
            return int(self._store.get(self._name))
        except (StoreFailed, ValueError):
            return 0

    def close(self) -> None:
        """Returns once all is noted, or can't be soon."""
        if self._writer is not None:
            self._todo.put(None)
            self._writer.join(NOTE_DEADLINE_S)

    def _write(self) -> None:
        while (index := self._todo.get()) is not None:
            while not self._todo.empty():
                if (newer := self._todo.get()) is None:
                    self._put(index)
                    return
                index = newer
            self._put(index)

    def _put(self, index: int) -> None:
        try:
            self._store.put(self._name, str(index).encode())
        except StoreFailed as error:
            log.warning("that round %d of reports is delivered is not noted: %s", index, error)


def forget_submission(submitted: Submitted) -> None:
    """The job has ended: nobody starts from it again."""
    with contextlib.suppress(StoreFailed):
        store = open_store(submitted.run_url)
        for name in (submitted.name, f"{submitted.name}.starts", submitted.delivered_name):
            store.delete(name)


def _content(submitted: Submitted) -> bytes:
    """Asks again for a while. Raises JobFailed where there is none; StoreFailed."""
    until_s = time.monotonic() + READ_TIMEOUT_S
    while True:
        try:
            return _read_once(submitted)
        except StoreFailed as error:
            if time.monotonic() > until_s:
                raise
            log.warning("what was submitted can't be read, tried again: %s", error)
        time.sleep(READ_AGAIN_S)


def _read_once(submitted: Submitted) -> bytes:
    """Raises JobFailed where asking again is of no use; StoreFailed."""
    folder = local_path(submitted.run_url)
    if folder is not None:
        return _read_file(folder / submitted.name)
    try:
        return open_store(submitted.run_url).get(submitted.name)
    except StoreError as error:
        if error.kind is not FailureKind.MISSING:
            raise
        raise JobFailed(f"what was submitted is gone: {error}") from error


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (FileNotFoundError, PermissionError) as error:
        raise JobFailed(
            f"{path}: {error.strerror}: a controller runs where it can read the run folder"
        ) from error
    except OSError as error:  # a disk or a server that is away
        raise StoreFailed(f"{path}: {error.strerror}") from error
