"""Which of the states that keepers saved, the next controller may go on from. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from elastic_ft.core.commands import RecordStep
from elastic_ft.core.source import StateAt


def candidates(
    records: Mapping[StateAt, Mapping[int, RecordStep]],
    recorded: int,
    computed_by: Mapping[int, int],
    newest: int = 0,
) -> Iterator[tuple[StateAt, tuple[RecordStep, ...]]]:
    """Saved states, the newest first, with the steps up to each that are yet to be recorded.

    Left out is what was rolled back and trained again, and what would leave a hole in the record.

    Args:
        records: by state, what its savers knew of the steps before it.
        recorded: steps of which the run folder has the line.
        computed_by: their generations.
        newest: the step of the newest checkpoint: what is not recorded up to there, is not needed.
    """
    for cut in sorted(records, reverse=True):
        record, (step, generation, _) = records[cut], cut
        history = {number: line.generation for number, line in record.items()} | {step: generation}
        if any(history[number] != computed_by[number] for number in history.keys() & computed_by):
            continue
        since = range(max(recorded, newest) + 1, step + 1)
        if record.keys() >= set(since):
            yield cut, tuple(record[number] for number in since)
