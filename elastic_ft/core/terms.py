"""What may not change while a run goes on from its checkpoints, if each sample is to be used once.

Position p of the data order is a function of (seed, step, batch, samples): with another of any of
them, going on at step s repeats samples or skips some, and no ledger of the new run alone would
show it (I2). The optimizer's settings are the state's own: its moments mean something else under
others. So each manifest has the terms that its steps were trained under, and whoever goes on from
it under other terms must say so (``--accept-changes``). Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from elastic_ft.errors import redacted

Terms = Mapping[str, Any]  # key of the job file, or one of DATA_KEYS -> JSON value

SAMPLES, FINGERPRINT = "data.samples", "data.fingerprint"  # of the opened data, not in job files
PRETRAINED = "model.pretrained.digest"  # of the weights at model.pretrained
DATA_KEYS = (SAMPLES, FINGERPRINT, PRETRAINED)  # what workers find when they read
# The model's configuration there, as JSON: who begins while the folder is away builds it of this.
PRETRAINED_CONFIG = "model.pretrained.config"
SEED, BATCH, LENGTH = "seed", "batch.global_batch_size", "data.sequence_length"
OPTIMIZER_KEYS = tuple(
    f"optimizer.{key}" for key in ("name", "betas", "eps", "weight_decay", "groups", "kwargs")
)
LORA = "model.lora"
JOB_KEYS = (SEED, BATCH, LENGTH, LORA, *OPTIMIZER_KEYS)
# These may change, as each step has its own anyway, or none has any: the journal tells.
NOTED_KEYS = (
    "steps",
    "model.pretrained",
    "batch.micro_batch_size",
    "precision.dtype",
    "precision.fp8",
    "comm.compress_shards",
    "comm.compress_replicas",
    "data.separate_documents",
    "optimizer.offload",
    *(
        f"optimizer.{key}"
        for key in ("lr", "schedule", "warmup_steps", "decay_steps", "min_lr_ratio", "grad_clip")
    ),
)


@dataclass(frozen=True, slots=True)
class Change:
    """``key`` was one thing, and is another."""

    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key} was {_shown(self.before)}, is {_shown(self.now)}"


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def terms_of(job: Mapping[str, Any]) -> dict[str, Any]:
    """The terms that are in a job file's values, resolved, as JSON has them."""
    return dict(_taken(job, (*JOB_KEYS, *NOTED_KEYS)))


def _taken(job: Mapping[str, Any], keys: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    for key in keys:
        section, _, name = key.rpartition(".")
        values = job.get(section) if section else job
        if not isinstance(values, Mapping) or name not in values:
            continue
        if key == LENGTH and values.get("url") is None:
            continue  # a dataset of the user's has its own
        value = values[name]
        if isinstance(value, str):
            value = redacted(value)
        yield key, list(value) if isinstance(value, tuple) else value


def data_terms(
    samples: int,
    fingerprint: str | None,
    pretrained: str | None = None,
    config: str | None = None,
) -> dict[str, Any]:
    """The terms that opened data adds, and opened weights, whose digest is ``pretrained``, and
    whose model is as ``config`` says. ``fingerprint``: None if nothing is known."""
    found = {FINGERPRINT: fingerprint, PRETRAINED: pretrained, PRETRAINED_CONFIG: config}
    return {SAMPLES: samples} | {key: value for key, value in found.items() if value}


def is_data_terms(data: Mapping[str, Any]) -> bool:
    """Whether it is what ``data_terms`` returns; {} is, of who has opened nothing."""
    others = (*DATA_KEYS[1:], PRETRAINED_CONFIG)
    samples, found = data.get(SAMPLES, 0), [data.get(key, "") for key in others]
    known = data.keys() <= {SAMPLES, *others} and (not data or SAMPLES in data)
    texts = all(isinstance(text, str) for text in found)
    return known and type(samples) is int and samples >= 0 and texts


def terms_of_manifest(extra: Mapping[str, Any]) -> Terms:
    """The terms that a manifest's ``extra`` has; {} if it has none, being an older one."""
    terms = extra.get("terms")
    return dict(terms) if isinstance(terms, Mapping) else {}


def changes(before: Terms, now: Terms) -> tuple[Change, ...]:
    """What differs and may not. A term that one of them lacks is not compared: manifests of
    before have none at all."""
    return _differences(before, now, (*JOB_KEYS, *DATA_KEYS))


def noted(before: Terms, now: Terms) -> tuple[Change, ...]:
    """What differs and may."""
    return _differences(before, now, NOTED_KEYS)


def _differences(before: Terms, now: Terms, keys: tuple[str, ...]) -> tuple[Change, ...]:
    found = (k for k in keys if k in before and k in now and before[k] != now[k])
    return tuple(Change(key, before[key], now[key]) for key in found)


def consequence(change: Change, step: int) -> str:
    """What going on from ``step`` all the same would do, in words."""
    if change.key == BATCH and isinstance(change.before, int):
        was, starts = step * change.before, step * change.now
        if starts > was:
            return f"samples {was} to {starts - 1} of the data order would be skipped"
        return f"samples {starts} to {was - 1} of the data order would be repeated"
    if change.key == SEED:
        return "the data order is another: samples would be repeated and others skipped"
    if change.key == LORA:
        return "the adapter was trained as the other"
    if change.key == PRETRAINED:
        return "the weights at model.pretrained are others than it began with"
    if change.key in (*DATA_KEYS, LENGTH):
        return "the samples are others: some would be repeated and some skipped"
    return "the optimizer's state was made under the other"


def refusal(found: tuple[Change, ...], step: int, whence: str) -> str:
    """Why a run does not go on, one line that begins with the key, and what to do."""
    first, *others = found
    more = "".join(f"; {change}" for change in others)
    return (
        f"{first}: {consequence(first, step)}{more}; --accept-changes goes on from step {step} "
        f"({whence}) all the same"
    )


def accepted(found: tuple[Change, ...], step: int) -> str:
    """What the journal says of changes that were asked for."""
    said = (f"{change}: {consequence(change, step)}" for change in found)
    return f"going on from step {step}, as was asked for: {'; '.join(said)}"


def as_fields(found: tuple[Change, ...]) -> dict[str, list[Any]]:
    """For a journal line: key -> [before, now]."""
    return {change.key: [change.before, change.now] for change in found}
