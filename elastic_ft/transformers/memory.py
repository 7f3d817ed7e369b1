"""What a Hugging Face trainer keeps beside its model, optimizer and scheduler."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from transformers.trainer_callback import ExportableState

from elastic_ft.transformers.kept import Kept

STATE = (
    "global_step",
    "epoch",
    "total_flos",
    "num_input_tokens_seen",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)
CONTROL = (
    "should_training_stop",
    "should_epoch_stop",
    "should_save",
    "should_evaluate",
    "should_log",
)
SUMS = ("_total_loss_scalar", "_globalstep_last_logged", "current_flos")


class TrainerMemory:
    """To be registered: ``TrainerState``, ``TrainerControl``, callbacks that keep something, losses
    that are not logged yet. The same on all ranks."""

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._kept = trainer, Kept(trainer)

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        kept: dict[str, Any] = {
            "state": {name: getattr(trainer.state, name) for name in STATE},
            "control": {name: getattr(trainer.control, name) for name in CONTROL},
            "sums": {name: getattr(trainer, name) for name in SUMS},
            "unlogged": trainer._tr_loss,
            "callbacks": [kept.state()["attributes"] for kept in self._callbacks()],
        }
        if self._kept.tokens is not None:
            kept["tokens"] = self._kept.tokens
        return kept | {"metrics": self._kept.copy("train")}

    def load_state_dict(self, kept: Mapping[str, Any]) -> None:
        trainer = self._trainer
        for holder, values in (
            (trainer.state, kept["state"]),
            (trainer.control, kept["control"]),
            (trainer, kept["sums"]),
        ):
            for name, value in values.items():
                setattr(holder, name, value)
        trainer._tr_loss = kept["unlogged"].cpu().clone()
        for callback, values in zip(self._callbacks(), kept["callbacks"], strict=True):
            for name, value in values.items():
                setattr(callback, name, value)
        if "tokens" in kept:
            self._kept.tokens = kept["tokens"]
        self._kept.put_back("train", kept["metrics"])

    def _callbacks(self) -> list[Any]:
        found = self._trainer.callback_handler.callbacks
        return [callback for callback in found if isinstance(callback, ExportableState)]


class History:
    """The newest entries of ``state.log_history``, as one tensor: they grow without bound, and have
    durations in them, which differ between ranks."""

    BYTES = 1 << 16
    may_differ = True  # between ranks, in what is carried as large tensors

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        history = self._trainer.state.log_history
        kept: list[bytes] = []
        room = self.BYTES - 64
        for entry in reversed(history):
            line = json.dumps(entry, default=float).encode()
            room -= len(line) + 1
            if room < 0:
                break
            kept.append(line)
        body = b"\n".join([str(len(history)).encode(), *reversed(kept)])
        raw = bytearray(body.ljust(self.BYTES, b"\n"))
        return {"newest": torch.frombuffer(raw, dtype=torch.uint8)}

    def load_state_dict(self, kept: Mapping[str, Any]) -> None:
        count, *lines = bytes(kept["newest"].numpy()).rstrip(b"\n").split(b"\n")
        history = self._trainer.state.log_history
        if len(history) >= int(count):  # of a step begun in vain; its own has durations of its own
            del history[int(count) :]
        else:
            history[:] = [json.loads(line) for line in lines]


class Generators:
    """Where a job of one worker draws from, which seeds nothing after the script has."""

    def state_dict(self) -> dict[str, Any]:
        kept: dict[str, Any] = {"torch": torch.get_rng_state()}
        kept["numpy"] = dict(np.random.get_state(legacy=False))  # type: ignore[arg-type, call-overload]
        kept["python"] = random.getstate()
        if torch.cuda.is_initialized():  # else nothing is drawn there
            kept["cuda"] = torch.cuda.get_rng_state()
        return kept

    def load_state_dict(self, kept: Mapping[str, Any]) -> None:
        torch.set_rng_state(kept["torch"])
        np.random.set_state(dict(kept["numpy"]))  # type: ignore[arg-type]
        version, internal, gauss = kept["python"]
        random.setstate((version, tuple(internal), gauss))
        if "cuda" in kept and torch.cuda.is_initialized():
            torch.cuda.set_rng_state(kept["cuda"])
