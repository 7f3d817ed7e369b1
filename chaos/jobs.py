"""The small job that scenarios disturb, and what its workers import: data at a steady pace."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

JOB: dict[str, Any] = {
    "name": "chaos",
    "steps": 600,  # more than any scenario needs: it is stopped when it has shown what it should
    "model": {
        "preset": "decoder-1m",
        "kwargs": {"dim": 32, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 64},
    },
    "data": {"path": "chaos.jobs:Paced", "kwargs": {"pause_s": 0.03}},
    "optimizer": {"lr": 1.0e-3, "warmup_steps": 10, "schedule": "constant"},
    "batch": {"global_batch_size": 16, "micro_batch_size": 2},
    "parallel": {"strategy": "fsdp"},
    "snapshot": {"every_steps": 1},
    "checkpoint": {"every_steps": 10, "every_s": None, "final": True},
    "elastic": {
        "min_workers": 1,
        "max_workers": 4,
        "start_timeout_s": 60,
        "gather_s": 60,
        "hang_timeout_s": 15,
        "heartbeat_timeout_s": 10,
        "suspend_timeout_s": 90,
        "max_generations_without_progress": 30,
    },
    "audit": True,
}


class Paced:
    """Samples that are a function of their index alone; a batch of them takes its time."""

    vocab_size, sequence_length = 101, 16

    def __init__(self, pause_s: float = 0.0) -> None:
        self._pause_s = pause_s

    def __len__(self) -> int:
        return 1009

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        token, tokens = index * 37 % self.vocab_size, []
        for position in range(self.sequence_length + 1):
            tokens.append(token)
            token = (5 * token + 7 + (index + position) % 3) % self.vocab_size
        return {"tokens": torch.tensor(tokens)}

    def collate(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        time.sleep(self._pause_s)
        return {"tokens": torch.stack([sample["tokens"] for sample in samples])}


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """``base`` with the sections and keys of ``changes``, at any depth."""
    result = dict(base)
    for key, value in changes.items():
        before = result.get(key)
        both = isinstance(before, dict) and isinstance(value, dict)
        result[key] = merged(before, value) if both else value
    return result


def undisturbed(values: dict[str, Any]) -> dict[str, Any]:
    """The same training on one worker, at full speed: one for every layout (I3)."""
    alone = {
        "name": "undisturbed",
        "elastic": {"min_workers": 1, "max_workers": 1},
        "checkpoint": {"every_steps": 0, "every_s": None, "final": False},
        "parallel": {},
        "snapshot": {},
        "audit": False,
    }
    values = values | alone
    if values["data"].get("path") == JOB["data"]["path"]:
        values["data"] = values["data"] | {"kwargs": {"pause_s": 0.0}}
    return values
