"""Exports of what a schedule-free optimizer has learned: see ``engines.schedule_free``.

A checkpoint has what training goes on from, y and z; what others compute with is their x.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from elastic_ft.core.manifest import Manifest
from elastic_ft.core.terms import terms_of_manifest
from elastic_ft.storage.shards import Reader, Want

BETA = 0.9  # that the package has by itself


class AveragedReader(Reader):
    """A checkpoint's reader, whose ``model.<name>`` is x where there is ``optim.<name>.z``.

    What is kept is as the package has it beside x: ``train_mode`` is False, and of what was never
    stepped z is x, where a checkpoint has 0.
    """

    def __init__(self, reader: Reader, beta: float) -> None:
        super().__init__(reader._store, reader.manifest, reader.url)
        self._beta = beta

    def read(self, wants: Iterable[Want]) -> int:
        given = list(wants)
        others = [(want, self._other(want)) for want in given]
        nbytes = super().read([*given, *(z for _, z in others if z is not None)])
        for want, z in others:
            if z is None or not z.box.numel:
                continue
            x, end = self._values(want), self._values(z)
            if end.any():  # of what was never stepped it is 0
                x.lerp_(end, 1.0 - 1.0 / self._beta)
        for want in given:
            if want.tensor.startswith("engine.") and want.tensor.endswith(".train_mode"):
                self._values(want).zero_()
        return nbytes + super().read(filter(None, map(self._never_stepped, given)))

    def _never_stepped(self, want: Want) -> Want | None:
        """What is read instead of a z that was read, and is 0."""
        kind, _, name = want.tensor.partition(".")
        if kind != "optim" or not name.endswith(".z") or not want.box.numel:
            return None
        if self._values(want).any():
            return None
        return Want(f"model.{name.removesuffix('.z')}", want.box, want.out)

    def _values(self, want: Want) -> torch.Tensor:
        dtype = getattr(torch, self.manifest.tensors[want.tensor].dtype)
        return torch.frombuffer(want.out, dtype=dtype)

    def _other(self, want: Want) -> Want | None:
        kind, _, name = want.tensor.partition(".")
        other = f"optim.{name}.z"
        if kind != "model" or other not in self.manifest.tensors:
            return None
        return Want(other, want.box, memoryview(bytearray(want.out.nbytes)))


def averaging_reader(reader: Reader) -> Reader:
    """``reader``, or what reads averages if its checkpoint is of a schedule-free optimizer."""
    beta = _beta_of(reader.manifest)
    return reader if beta is None else AveragedReader(reader, beta)


def _beta_of(manifest: Manifest) -> float | None:
    """None for any other optimizer, and before the first step."""
    terms: Mapping[str, Any] = terms_of_manifest(manifest.extra)
    name = terms.get("optimizer.name", "")
    if not manifest.step or not name.startswith(("schedule_free_", "schedulefree:")):
        return None
    kwargs = terms.get("optimizer.kwargs") or {}
    betas = terms["optimizer.betas"] if name == "schedule_free_adamw" else [BETA]
    return float(kwargs.get("momentum", kwargs.get("betas", betas)[0]))
