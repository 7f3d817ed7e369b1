"""Who may write under a URL: the newest of its owners, and the store itself says who that is.

Each controller takes a URL over, at its start, by creating one more object than there is. It holds
the URL until a higher number exists, and looks before whatever it publishes or deletes. One that
was stopped meanwhile looks when it wakes up; no clock is needed. Under the URL::

    owners/<n>          a controller, from 1; created by a conditional write, never changed
    owners/<n>.found    the checkpoints that it found: no other one of earlier owners counts
    owners/<run>.ended  that controller ended in good order, or what it left has been rescued

Between a look and the write that follows, another may take over. What is published then is not
among what the other has found, and no reader counts it (``counting``); what is deleted
then is what the older one had already done with.
"""

from __future__ import annotations

import json
import re
import secrets
import socket
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

from elastic_ft.core.assignment import CheckpointRef
from elastic_ft.core.typed import decoder
from elastic_ft.errors import (
    MALFORMED,
    StateDamaged,
    StorageError,
    StoreFailed,
    Superseded,
    UsageError,
)
from elastic_ft.storage import checkpoints
from elastic_ft.storage.shards import parallel
from elastic_ft.storage.store import Store, if_there

FOLDER = "owners"
TAKE_ATTEMPTS = 32  # lost races and lost acknowledgements
LOOKUP_THREADS = 16
BEHIND_MAX = 64  # runs that may yet come late
_NUMBER = re.compile(rf"^{FOLDER}/(\d+)$")
_FOUND = re.compile(rf"^{FOLDER}/(\d+)\.found$")


@dataclass(frozen=True, slots=True)
class Owner:
    """A controller, as its object says.

    Attributes:
        nonce: drawn once: tells an acknowledgement that was lost from a race that was.
        unended: runs before it that have not ended, and that nobody has rescued.
        behind: runs that are superseded without having been here, the newest last.
        address: where workers and keepers of the one before it can call it, with their job's key
            ("host:port"); "": it adopts nobody, and they end. Anyone may read it, or put one
            there: that it is theirs, each end proves to the other (``transport.handshake``).
        adopts: the run whose workers these are; "": it has its own.
    """

    job: str
    run: str
    run_folder: str
    host: str
    at_s: float
    nonce: str
    unended: tuple[str, ...] = ()
    behind: tuple[str, ...] = ()
    address: str = ""
    adopts: str = ""

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()


def check_job(store: Store, job: str) -> None:
    """Raises UsageError, one line, where the URL is another job's; StoreFailed; StorageError where
    its newest owner's object can't be understood."""
    number, _ = _listed(store)
    _refuse_other(store, _read(store, number) if number else None, job)


def newest(store: Store) -> tuple[Owner | None, bool]:
    """Who has the URL, None if nobody ever had, and whether that one has ended in good order.

    Raises StoreFailed; StorageError where its object can't be understood.
    """
    number, ended = _listed(store)
    owner = _read(store, number) if number else None
    return owner, owner is not None and owner.run in ended


def successor(store: Store, number: int) -> str | None:
    """Who came after owner ``number``, in words; None if nobody has. Raises StoreFailed."""
    other = _read(store, number + 1)
    return None if other is None else f"run {other.run}, on {other.host}, has the job now"


def newest_after(store: Store, number: int) -> tuple[int, Owner] | None:
    """The newest owner, if it is newer than ``number``. Raises StoreFailed; StorageError where its
    object can't be understood."""
    found = None
    while (other := _read(store, number + 1)) is not None:
        number += 1
        found = number, other
    return found


def take_over(
    store: Store,
    *,
    job: str,
    run: str,
    run_folder: str,
    behind: Collection[str] = (),
    renamed: bool = False,
    address: str = "",
    adopts: str = "",
    admit: Callable[[Owner], object] = bool,
) -> Claim:
    """The URL is controller ``run``'s from now on. Whoever had it ends as soon as it looks.

    Args:
        behind: runs that are superseded elsewhere (in the run folder): should one of them come
            here late, it is refused.
        renamed: another job's URL is this job's, under its earlier name.
        address, adopts: as ``Owner`` has them.
        admit: called with each owner that would be superseded, and has not ended; raises where it
            is to stay. Should another one come first, it is called with that one, too.

    Raises what ``admit`` raises; UsageError where the URL is another job's; Superseded where
    ``run`` comes late; StoreFailed.
    """
    nonce, trouble, was = secrets.token_hex(16), "", ""
    number, ended = _listed(store)
    for _ in range(TAKE_ATTEMPTS):
        before = _read(store, number) if number else None
        if renamed:
            was = before.job if before is not None else _job_of_checkpoints(store) or job
        else:
            _refuse_other(store, before, job)
        unended, passed = _left(store, before, run, ended, behind)
        if before is not None and before.run not in ended:
            admit(before)
        host, at_s = socket.gethostname(), time.time()
        owner = Owner(job, run, run_folder, host, at_s, nonce, unended, passed, address, adopts)
        key = f"{FOLDER}/{number + 1}"
        try:
            won = store.put_if_absent(key, owner.to_json())
        except StoreFailed as error:  # it may be there all the same
            won, trouble = False, f": {error}"
        found = owner if won else _read(store, number + 1)
        if found is not None and found.nonce == nonce:
            return Claim(store, number + 1, found, was if was != job else "", before)
        if found is not None:  # another was first: after it
            number += 1
            _, ended = _listed(store)
    raise StoreFailed(f"{store.url} could not be taken over in {TAKE_ATTEMPTS} attempts{trouble}")


def _left(
    store: Store, before: Owner | None, run: str, ended: Collection[str], behind: Collection[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What ``run`` is left with after ``before``: ``unended`` and ``behind``. Raises Superseded."""
    known = () if before is None else before.behind
    if before is not None and run in known:
        raise Superseded(f"{store.url}: superseded by run {before.run}: it has the job now")
    left = () if before is None else (*before.unended, before.run)
    unended = tuple(one for one in left if one not in ended and one != run)
    return unended, tuple(dict.fromkeys((*known, *behind)))[-BEHIND_MAX:]


def is_rescued(store: Store, run: str) -> bool:
    """Whether nothing of ``run`` is left to be rescued. Raises StoreFailed."""
    return store.exists(f"{FOLDER}/{run}.ended")


class Claim:
    """A controller's hold on a URL. Any method may be called from any thread.

    Attributes:
        number: among the owners of this URL; manifests carry it (``extra["owner"]``).
        unended: earlier runs that have not ended and were not rescued, the oldest first.
        renamed_from: the job's earlier name, if it had one here.
        before: the owner before this one.
    """

    def __init__(
        self,
        store: Store,
        number: int,
        owner: Owner,
        renamed_from: str = "",
        before: Owner | None = None,
    ) -> None:
        self.number, self.owner, self.renamed_from = number, owner, renamed_from
        self.before = before
        self.unended = owner.unended
        self._store = store
        self._next = number + 1

    @property
    def next_key(self) -> str:
        """The object whose appearance ends this claim."""
        return f"{FOLDER}/{self._next}"

    def check(self) -> None:
        """Raises Superseded if another has taken over; StoreFailed if that can't be told."""
        while (other := _read(self._store, self._next)) is not None:
            if other.run != self.owner.run:
                since = time.strftime("%H:%M:%S", time.localtime(other.at_s))
                raise Superseded(
                    f"{self._store.url}: superseded by run {other.run} of job {other.job}, started "
                    f"on {other.host} at {since}: it has the job now, this controller ends"
                )
            self._next += 1

    def ended(self, run: str | None = None) -> None:
        """Nothing of ``run`` (by default this one) is left to be rescued. Raises StoreFailed."""
        self._store.put(f"{FOLDER}/{run or self.owner.run}.ended", b"")

    def checkpoints(self) -> tuple[CheckpointRef, ...]:
        """All that count, newest first: what earlier owners publish from now on does not.

        Raises StoreFailed.
        """
        refs = counting(self._store, checkpoints.committed(self._store))
        keys = [_key(self._store, ref) for ref in refs]
        self._store.put(f"{FOLDER}/{self.number}.found", json.dumps(keys).encode())
        return refs


def counting(store: Store, refs: Sequence[CheckpointRef]) -> tuple[CheckpointRef, ...]:
    """Those that count, in their order. Raises StoreFailed."""
    counted = parallel(counted_in(store), refs, LOOKUP_THREADS)
    return tuple(ref for ref, good in zip(refs, counted, strict=True) if good)


def counted_in(store: Store) -> Callable[[CheckpointRef], bool]:
    """Tells of a checkpoint whether it counts: the newest owner that looked found it, or it was
    published by that one or a later one. Both raise StoreFailed."""
    matches = (_FOUND.match(key) for key in store.list(FOLDER))
    number = max((int(found[1]) for found in matches if found), default=0)
    found = _parse_keys(store, f"{FOLDER}/{number}.found") if number else frozenset()

    def counts(ref: CheckpointRef) -> bool:
        return not number or _key(store, ref) in found or _is_by(store, ref, number)

    return counts


def _is_by(store: Store, ref: CheckpointRef, number: int) -> bool:
    """Whether owner ``number`` or a later one published it. True where that can't be understood:
    readers will refuse it."""
    try:
        by = checkpoints.load_manifest(store, ref).extra.get("owner", 0)
    except StateDamaged:
        return True
    return isinstance(by, int) and by >= number


def _key(store: Store, ref: CheckpointRef) -> str:
    return ref.url.removeprefix(f"{store.url}/")


def _listed(store: Store) -> tuple[int, frozenset[str]]:
    """The highest number, 0 if there is none, and the runs that have ended."""
    keys = store.list(FOLDER)
    matches = (_NUMBER.match(key) for key in keys)
    number = max((int(found[1]) for found in matches if found), default=0)
    names = (key.rpartition("/")[2] for key in keys if key.endswith(".ended"))
    return number, frozenset(name.removesuffix(".ended") for name in names)


def _read(store: Store, number: int) -> Owner | None:
    """Raises StorageError, one line, where the object is none of ours."""
    key = f"{FOLDER}/{number}"

    def read() -> Owner:
        return _parse(store.get(key))

    try:
        try:
            return if_there(read)
        except MALFORMED:  # perhaps on its way
            return if_there(read)
    except MALFORMED as error:
        raise StorageError(
            f"{store.url_of(key)} is not what a controller writes ({type(error).__name__}: "
            f"{error}): if no controller of this URL is alive, delete it"
        ) from None


def _parse(content: bytes) -> Owner:
    """Raises one of MALFORMED."""
    owner: Owner = decoder(Owner)(json.loads(content))
    return owner


def _refuse_other(store: Store, owner: Owner | None, job: str) -> None:
    if owner is None:
        name, where = _job_of_checkpoints(store), ""
    else:
        name, where = owner.job, f" (its run folder: {owner.run_folder})"
    if name is not None and name != job:
        raise UsageError(
            f"{store.url} is of job {name!r}{where}, not of {job!r}: each job needs a run folder "
            "and a checkpoint.url of its own (--accept-changes, if it was renamed)"
        )


def _job_of_checkpoints(store: Store) -> str | None:
    """Whose they are that a version without owners left; None if there are none."""
    for ref in checkpoints.committed(store):
        with suppress(StateDamaged):
            return checkpoints.load_manifest(store, ref).job
    return None


def _parse_keys(store: Store, key: str) -> frozenset[str]:
    try:
        return frozenset(map(str, json.loads(store.get(key))))
    except MALFORMED as error:
        raise StorageError(f"{store.url_of(key)} is not a list of checkpoints: {error}") from None
