"""Loads the next steps' micro-batches in the background, and is cheap to redirect.

A new generation deals the same micro-batches to other ranks. What is loaded is therefore kept per
(step, sample ids), not per request: after ``cancel`` and new requests, a survivor loads only what
it did not have (I6). It is kept with the ids that were read for it, which is what the ledger says
of a step: the reading, not the plan of it (I2).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from elastic_ft.core.batches import SampleIds
from elastic_ft.data.draws import Draws
from elastic_ft.data.reading import Loaded, read_micro_batch
from elastic_ft.data.settings import Path, Settings, changed_settings, settings_of, to_be_told
from elastic_ft.errors import GroupBroken

DEPTH_STEPS = 2  # that are wanted at a time
JOIN_TIMEOUT_S = 5.0
PASSED_OVER_S = 1.0  # how often it is looked at what a stream passes over, and who reads


class Readers(Protocol):
    """Who else reads, beside this process: see ``data.reading_processes``."""

    made_with: Settings

    @property
    def own_settings(self) -> frozenset[Path]: ...

    @property
    def readers(self) -> Sequence[Callable[[SampleIds], Loaded]]: ...

    def end_stopped(self) -> None:
        """Those that would never answer."""

    def set(self, settings: Settings) -> None:
        """Of the dataset, those that were changed: for what is read from now on."""

    def close(self) -> None: ...


class Prefetcher:
    """Micro-batches by step; of DEPTH_STEPS at most. A thread for each who reads.

    Use from the training thread: ``request`` a step or two ahead, then ``get`` each step once.
    ``cancel`` may come from any thread. ``dataset[i]`` runs in the background thread and must
    depend on ``i`` alone (I3). A sample's id tells its index: the rest of its division by
    ``len(dataset)``.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        draws: Draws | None = None,
        reads: Callable[[], int] = lambda: 0,
        others: Readers | None = None,
        finish: Callable[[Any], Any] | None = None,
    ) -> None:
        """``draws``: of a dataset that may draw from the global generators. One that does is read
        while ``get`` waits for it, and at no other time. ``reads``: grows while a stream passes
        over samples. ``others``: read instead of this process, whatever draws; they end with it.
        ``finish``: what to make of each micro-batch, in a background thread.
        """
        self._dataset = dataset
        self._collate = dataset.collate
        self._draws, self._gets = draws, 0
        self._awaited: int | None = None  # the step that ``get`` waits for
        if draws is not None and hasattr(dataset, "seeded_by"):  # a stream: it reads others, too
            dataset.seeded_by(draws.begin)
        self._reads, self._others, self._finish = reads, others, finish
        self._readers = others.readers if others is not None else [self._read]
        self._reading: set[tuple[int, SampleIds]] = set()
        self._delivered: tuple[int, list[SampleIds]] = (0, [])
        # By which is read.
        self._settings: Settings | None = others.made_with if others is not None else None
        self._own_settings: frozenset[Path] | None = None  # that reading itself changes
        self._is_learnt = False  # which those are
        self._set = frozenset[Path]()  # by the script, at any time
        self._version, self._renewed_at = 0, 0  # of the settings; the step, until the next is got
        self._changed = threading.Condition()
        self._wanted: dict[int, list[SampleIds]] = {}
        self._loaded: dict[tuple[int, SampleIds], Loaded] = {}
        self._failed: dict[tuple[int, SampleIds], Exception] = {}
        self._cancellations = 0
        self._closed = False
        self._threads: list[threading.Thread] = []

    def request(self, step: int, micro_batches: Sequence[Sequence[int]]) -> None:
        """Asks for the micro-batches of ``step``; returns at once. Replaces an earlier request.

        Raises ValueError if DEPTH_STEPS other steps are already wanted.
        """
        with self._changed:
            if self._settings is None:
                self._settings = settings_of(self._dataset)
            if step not in self._wanted and len(self._wanted) >= DEPTH_STEPS:
                raise ValueError(
                    f"step {step} requested while {sorted(self._wanted)} are wanted; "
                    f"at most {DEPTH_STEPS} at once"
                )
            self._wanted[step] = [tuple(ids) for ids in micro_batches]
            self._failed.clear()
            self._start_threads()
            self._changed.notify_all()

    def get(
        self, step: int, timeout_s: float = 300.0, progress: Callable[[], None] | None = None
    ) -> list[Loaded]:
        """Returns the micro-batches of ``step``, in the order of its request, and forgets it.

        Raises whatever the dataset raised; TimeoutError where not one more was loaded for
        ``timeout_s``, however long all of them take; GroupBroken if ``cancel`` came meanwhile;
        ValueError for a step that is not wanted. A stream's samples count that are passed over;
        ``progress`` is called after some of them, and may raise.
        """
        with self._changed:
            if step not in self._wanted:
                raise ValueError(f"step {step} was not requested; wanted: {sorted(self._wanted)}")
            self._awaited, self._gets = step, self._gets + 1
            self._changed.notify_all()
            try:
                self._await(step, timeout_s, progress)
            finally:
                self._awaited = None
            micro_batches = self._wanted.pop(step)
            self._delivered = step, micro_batches
            self._renewed_at = 0 if step != self._renewed_at else step
            self._forget_outside(step)
            return [self._loaded[step, ids] for ids in micro_batches]

    def _await(self, step: int, timeout_s: float, progress: Callable[[], None] | None) -> None:
        before, done = self._cancellations, (0, 0)
        deadline_s = 0.0
        while missing := self._missing(step):
            self._raise_failure(step)
            now_s, reads = time.monotonic(), self._reads()
            passed_over = bool(deadline_s) and reads > done[1]
            if not deadline_s or (-len(missing), reads) > done:
                done, deadline_s = (-len(missing), reads), now_s + timeout_s
            if now_s >= deadline_s:
                raise TimeoutError(
                    f"step {step}: {len(missing)} micro-batches not loaded, and no other for "
                    f"{timeout_s:g} s, the first of them {missing[0]}"
                )
            heard = self._changed.wait(min(PASSED_OVER_S, deadline_s - now_s))
            if not heard and self._others is not None:
                self._others.end_stopped()
            if passed_over and progress is not None:
                self._changed.release()  # ``cancel`` may come meanwhile, and samples
                try:
                    progress()
                finally:
                    self._changed.acquire()
            if self._cancellations != before or self._closed:
                raise GroupBroken(f"step {step}: its data was cancelled by a new generation")

    def renew(self) -> bool:
        """Whether the dataset's settings are others than by which samples were read. Then nothing
        is kept of these, and what was delivered last is wanted again."""
        with self._changed:
            others, now = self._others, settings_of(self._dataset)
            own = others.own_settings if others is not None else self._own_settings or frozenset()
            changed = changed_settings(self._settings or {}, now) - own
            if not changed:
                return False
            self._settings, self._version, self._set = now, self._version + 1, self._set | changed
            self._loaded.clear()
            self._failed.clear()
            step, micro_batches = self._delivered
            self._wanted[step], self._renewed_at = micro_batches, step
            if others is not None:
                others.set(to_be_told(now, self._set - own))
            self._changed.notify_all()
            return True

    def finished(self, data: Any) -> Any:
        """A micro-batch that was read elsewhere, as those that are read here."""
        return data if self._finish is None else self._finish(data)

    def cancel(self) -> None:
        """Drops every request and wakes a waiting ``get``; what is loaded is kept."""
        with self._changed:
            self._wanted.clear()
            self._failed.clear()
            self._cancellations += 1
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the threads; waits for at most 5 s for the samples that they are loading."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._others is not None:
            self._others.close()
        for thread in self._threads:
            thread.join(JOIN_TIMEOUT_S)

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _missing(self, step: int) -> list[SampleIds]:
        return [ids for ids in self._wanted[step] if (step, ids) not in self._loaded]

    def _raise_failure(self, step: int) -> None:
        for ids in self._wanted[step]:
            error = self._failed.get((step, ids))
            if error is not None:
                raise error

    def _forget_outside(self, step: int) -> None:
        """Keeps the delivered step, for another deal of it, and those ahead: a bound (I7)."""
        for key in [k for k in self._loaded if not step <= k[0] <= step + DEPTH_STEPS]:
            del self._loaded[key]

    def _start_threads(self) -> None:
        if not self._threads:
            for read in self._readers:
                thread = threading.Thread(
                    target=self._work, args=(read,), name="prefetch", daemon=True
                )
                self._threads.append(thread)
                thread.start()

    def _work(self, read: Callable[[SampleIds], Loaded]) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._may_read())
                if self._closed:
                    return
                key = self._next()
                assert key is not None
                self._reading.add(key)
            self._load(key, read)

    def _may_read(self) -> bool:
        draws = self._draws is not None and self._draws.known is not False
        # Was that reading which has set something?
        is_learning = self._own_settings is not None and not self._is_learnt
        alone = draws or self._renewed_at or is_learning
        key = self._next()
        if key is None or not alone or self._others is not None:  # those draw and set their own
            return key is not None
        return key[0] == self._awaited  # the next one would be read beside this one's computing

    def _next(self) -> tuple[int, SampleIds] | None:
        for step in sorted(self._wanted):
            for ids in self._missing(step):
                if (step, ids) not in self._failed and (step, ids) not in self._reading:
                    return step, ids
        return None

    def _load(self, key: tuple[int, SampleIds], read: Callable[[SampleIds], Loaded]) -> None:
        version, failed, loaded = self._version, dict[Any, Exception](), dict[Any, Loaded]()
        try:
            found = read(key[1])
            if self._finish is not None:
                found = replace(found, data=self._finish(found.data))
            loaded[key] = found
        except Exception as error:  # the user's dataset may raise anything; get() raises it
            failed[key] = error
        with self._changed:
            self._reading.discard(key)
            if version == self._version:  # else it is read again
                self._failed |= failed
                self._loaded |= loaded
            self._changed.notify_all()

    def _read(self, wanted: SampleIds) -> Loaded:
        gets = self._gets
        if self._is_learnt and not self._renewed_at:
            return read_micro_batch(self._dataset, self._collate, self._draws, wanted)
        before = settings_of(self._dataset)
        read = read_micro_batch(self._dataset, self._collate, self._draws, wanted)
        now = settings_of(self._dataset)
        with self._changed:
            is_first = self._own_settings is None
            has_waited = self._awaited is not None and gets == self._gets  # the script
            if is_first or has_waited:
                self._learn(changed_settings(before, now), now)
        return read

    def _learn(self, changed: frozenset[Path], now: Settings) -> None:
        """Reading has ``changed`` these. What its first micro-batch sets and the second does not
        (what was made when it was wanted) may be the script's later on."""
        own = self._own_settings
        if own is None:
            self._own_settings, self._is_learnt = changed, not changed
        elif self._is_learnt:
            self._own_settings = own | changed
        else:
            made = {path: now[path] for path in (own - changed) & now.keys()}
            self._settings = (self._settings or {}) | made
            self._own_settings, self._is_learnt = changed, True
