"""Where the CPU waits for the GPU within a step, in a world of one: torch says so of each place.

One line for each kind of job. A step is to wait once, behind all that it has queued by the time of
its agreement: more, or a copy from memory that is not page-locked, is a failure. On the CPU nothing
waits, and what asks for a number is counted instead.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
from ranks import form

from elastic_ft.config import parse_job
from elastic_ft.engines.base import MicroBatch
from elastic_ft.engines.native import NativeEngine
from elastic_ft.models import named
from elastic_ft.models.build import build_model

LENGTH, MICRO_BATCHES, WARM_STEPS = 128, 3, 2
BF16 = {"precision": {"dtype": "bf16"}}
FSDP = {"parallel": {"strategy": "fsdp"}}
KINDS: dict[str, dict[str, Any]] = {
    "ddp": BF16,
    "fsdp": BF16 | FSDP,
    "fp16": {"precision": {"dtype": "fp16"}} | FSDP,
    "experts": BF16 | FSDP | {"model": {"preset": "decoder-moe-4m"}},
    "offload": BF16 | FSDP | {"optimizer": {"offload": "cpu"}},
    "muon": BF16 | FSDP | {"optimizer": {"name": "muon"}},
    "sgd": BF16 | FSDP | {"optimizer": {"name": "sgd", "grad_clip": 1.0}},
}
SAYS = "called a synchronizing CUDA operation"
ASKS = ("tolist", "item")  # of a tensor, on the CPU


@contextmanager
def waits(device: str) -> Iterator[list[str]]:
    """Where Python has waited by its end."""
    found: list[str] = []
    if device == "cpu":
        with mock.patch.object(named, "is_waited_for", lambda _: True):
            real = {name: getattr(torch.Tensor, name) for name in ASKS}
            for name in ASKS:
                setattr(torch.Tensor, name, _noting(real[name], name, found))
            try:
                yield found
            finally:
                for name in ASKS:
                    setattr(torch.Tensor, name, real[name])
        return
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
            found += [f"{w.filename}:{w.lineno}" for w in told if SAYS in str(w.message)]


def _noting(real: Any, name: str, found: list[str]) -> Any:
    def asked(*args: Any, **how: Any) -> Any:
        found.append(name)
        return real(*args, **how)

    return asked


def waits_of(kind: str, device: str) -> list[str]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    values: dict[str, Any] = {
        "name": "waits",
        "steps": 100,
        "model": {"preset": "decoder-4m"},
        "data": {"url": "stdlib:", "sequence_length": LENGTH},
        "batch": {"global_batch_size": MICRO_BATCHES, "micro_batch_size": 1},
    }
    job = parse_job(values | KINDS[kind])
    engine = NativeEngine(
        job,
        lambda: build_model(job.model, vocab_size=4096, sequence_length=LENGTH),
        torch.device(device, 0) if device == "cuda" else torch.device(device),
        LENGTH,
    )
    engine.prepare()
    groups = form(0, 1, store.port, engine.device)
    engine.attach(groups)
    engine.initialise()
    engine.restored()
    for number in range(1, WARM_STEPS + 2):
        batches = [MicroBatch(n, _tokens(device)) for n in range(MICRO_BATCHES)]
        with waits(device) as found:
            sums = engine.run_batch(number, batches, lambda *_: None)
            engine.named.means(sums.named)
            engine.apply(number, sums.tokens, sums.squares, lambda *_: None)
    groups.abort("the end")
    engine.detach()
    groups.teardown()
    return found


def _tokens(device: str) -> dict[str, torch.Tensor]:
    """With labels, of which some are left out: they are counted on the device."""
    tokens = torch.randint(4096, (1, LENGTH + 1))
    batch = {"tokens": tokens, "labels": tokens.masked_fill(tokens < 9, -100)}
    return {k: v.pin_memory() for k, v in batch.items()} if device == "cuda" else batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    more = []
    for kind in KINDS:
        found = waits_of(kind, options.device)
        print(json.dumps({"kind": kind, "waits": found}), flush=True)
        more += [kind] if len(found) > 1 else []
    if more:
        sys.exit(f"more than one wait in a step: {', '.join(more)}")


if __name__ == "__main__":
    main()
