"""Whether a run goes on under the terms of the checkpoint that it goes on from (I2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from elastic_ft.config import Job
from elastic_ft.core.assignment import CheckpointRef
from elastic_ft.core.batches import samples_in_words
from elastic_ft.core.terms import (
    DATA_KEYS,
    SAMPLES,
    Change,
    Terms,
    accepted,
    as_fields,
    changes,
    noted,
    refusal,
    terms_of,
)
from elastic_ft.errors import ConfigError
from elastic_ft.observe.run_folder import RunFolder, read_lines

DATA_OPENED = "data_opened"
ACCEPTED = "changes_accepted"

WriteJournal = Callable[[str, int, str, dict[str, Any]], None]


class Continuity:
    """Of one start of a controller.

    Attributes:
        accepts: whether changes are.
        data: the data's terms, that workers must find; {} until they are known.
    """

    def __init__(self, job: Job, accept_changes: bool, journal: WriteJournal) -> None:
        self._job = terms_of(job.model_dump(mode="json"))
        self.accepts, self._journal = accept_changes, journal
        self._name = job.name
        self._before: Terms = {}
        self._step = 0
        self._opened = False
        self.data: dict[str, Any] = {}

    @property
    def terms(self) -> Terms:
        """What a checkpoint written now was trained under."""
        return self._job | self.data

    def as_json(self) -> dict[str, Any]:
        """For ``go_on``."""
        return {
            "before": self._before,
            "step": self._step,
            "opened": self._opened,
            "data": self.data,
        }

    def go_on(self, values: dict[str, Any]) -> None:
        """As the one that gave ``values``, of the same job."""
        self._before, self._step = dict(values["before"]), int(values["step"])
        self._opened, self.data = bool(values["opened"]), dict(values["data"])

    def check(self, before: Terms, ref: CheckpointRef | None) -> None:
        """``before``: the terms of checkpoint ``ref``, which the run is to go on from.

        Raises ConfigError if the job's are others, and that was not accepted.
        """
        self._before, self._step = before, ref.step if ref else 0
        found = changes(before, self._job)
        if found and ref is not None and not self.accepts:
            raise ConfigError(refusal(found, ref.step, ref.url))
        wanted = {} if self.accepts else before
        self.data = {key: value for key, value in wanted.items() if key in DATA_KEYS}

    def begin(self, generation: int, renamed_from: str = "") -> None:
        """Journals what has changed since the checkpoint. ``generation``: the last one before."""
        if renamed_from:
            change = Change("name", renamed_from, self._name)
            fields = {"step": self._step, "changes": as_fields((change,))}
            self._journal("job_changed", generation, f"the job was renamed: {change}", fields)
        if found := changes(self._before, self._job):
            self._tell(found, generation)
        if found := noted(self._before, self._job):
            said = "; ".join(map(str, found))
            fields = {"step": self._step, "changes": as_fields(found)}
            self._journal("job_changed", generation, f"from step {self._step} on: {said}", fields)

    def opened(self, data: Terms, generation: int) -> None:
        """Most workers of a world that forms read ``data``; the others will be refused there.

        ``generation``: the one before it, the last that may have trained under other terms.
        """
        if self._opened or not data:
            return
        self._opened = True
        if found := changes(self._before, data):
            self._tell(found, generation)
        self.data = dict(data)
        reason = samples_in_words(data[SAMPLES], "training")
        self._journal(DATA_OPENED, generation, reason, {"data": dict(data)})

    def _tell(self, found: tuple[Change, ...], generation: int) -> None:
        fields = {"step": self._step, "changes": as_fields(found)}
        self._journal(ACCEPTED, generation, accepted(found, self._step), fields)


def most_common(read: Sequence[Terms]) -> Terms:
    return max(read, key=read.count, default={})


def recorded_terms(folder: RunFolder) -> Terms:
    """What the controller before this one trained under, as its run folder says."""
    opened = [e for e in read_lines(folder.path / "events.jsonl") if e["event"] == DATA_OPENED]
    return terms_of(folder.recorded_job()) | (opened[-1]["data"] if opened else {})
