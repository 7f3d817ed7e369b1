"""The tiny data and models that workers of these tests import by path."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.utils.rnn import pad_sequence

from chaos.jobs import Paced
from elastic_ft.config import DataConfig
from elastic_ft.data.dataset import open_dataset
from elastic_ft.errors import DataError
from elastic_ft.models.decoder import Decoder, DecoderConfig
from elastic_ft.worker import restore

GATE_DEADLINE_S = 60.0


class Gated:
    """A dataset that can be read only while its gate, a file, is not there.

    Args:
        free: the first reads of each process, which no gate holds up.
    """

    def __init__(self, samples: Any, gate: Path, free: int = 0) -> None:
        self._samples, self._gate, self._free = samples, gate, free

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        deadline = time.monotonic() + GATE_DEADLINE_S
        self._free -= 1
        while self._free < 0 and self._gate.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self._gate} stood for {GATE_DEADLINE_S:g} s")
            time.sleep(0.01)
        return self._samples[index]

    def collate(self, samples: list[Any]) -> Any:
        return self._samples.collate(samples)


def gated(seed: int, gate: str, free: int = 0, **corpus: Any) -> Any:
    """The samples of a corpus, behind a gate with which a test holds training back."""
    bundle = open_dataset(DataConfig(**corpus), seed)
    samples = Gated(bundle.train, Path(gate), free)
    samples.vocab_size, samples.sequence_length = bundle.vocab_size, bundle.sequence_length  # type: ignore[attr-defined]
    return samples


def as_on_a_gpu(seed: int, **corpus: Any) -> Any:
    """The samples of a corpus, for workers whose live shard leaves its device before the next."""
    restore.is_on_gpu = lambda state: True
    bundle = open_dataset(DataConfig(**corpus), seed)
    samples = bundle.train
    samples.vocab_size, samples.sequence_length = bundle.vocab_size, bundle.sequence_length  # type: ignore[attr-defined]
    return samples


class Counted(Paced):
    """Samples that are a function of their index alone: what golden losses are made of."""

    sequence_length = 12

    def __init__(self) -> None:
        super().__init__(pause_s=0.0)

    def __len__(self) -> int:
        return 173


def counted(gate: str | None = None) -> Any:
    """The same samples everywhere; with a gate, behind it."""
    return _behind(gate, Counted())


def _behind(gate: str | None, samples: Any) -> Any:
    if gate is not None:
        samples = Gated(samples, Path(gate))
        samples.vocab_size, samples.sequence_length = Counted.vocab_size, Counted.sequence_length
    return samples


class Lethal(Counted):
    """Held-out samples: of the processes that come to the third read, one is killed."""

    def __init__(self, mark: str | None) -> None:
        super().__init__()
        self._mark, self._reads = mark, 0

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self._reads += 1
        if self._mark is not None and self._reads == 3:
            with contextlib.suppress(FileExistsError):
                os.close(os.open(self._mark, os.O_CREAT | os.O_EXCL))
                os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index + 173)


def counted_and_held_out(gate: str | None = None, mark: str | None = None) -> Any:
    return counted(gate), Lethal(mark)


class Packed(Counted):
    """Each sample is two documents, and one token of the first is padding."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = super().__getitem__(index)["tokens"]
        places = torch.arange(len(tokens))
        begins = 3 + index % 5
        position_ids = torch.where(places < begins, places, places - begins)
        labels = tokens.masked_fill(position_ids == 0, -100)
        mask = (places != begins - 1).long()
        batch = {"tokens": tokens, "labels": labels}
        return batch | {"position_ids": position_ids, "attention_mask": mask}

    def collate(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}


def packed() -> Any:
    return Packed()


class Apart(Packed):
    """Two documents a sample, without padding."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        return {key: value for key, value in sample.items() if key != "attention_mask"}


def apart(gate: str | None = None) -> Any:
    return _behind(gate, Apart())


class Ragged(Counted):
    """Each sample has a length of its own; a batch is padded to its longest, as tokenizers do."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = super().__getitem__(index)["tokens"]
        return {"input_ids": tokens[: 4 + index * 5 % 9]}

    def collate(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        ids = [sample["input_ids"] for sample in samples]
        masks = pad_sequence([torch.ones_like(i) for i in ids], batch_first=True)
        return {"input_ids": pad_sequence(ids, batch_first=True), "attention_mask": masks}


def ragged() -> Any:
    return Ragged()


class OfAnyLength(Counted):
    """A batch is as long as its first sample says: of 4 to 12 positions, odd ones among them."""

    def collate(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        tokens = super().collate(samples)["tokens"]
        return {"tokens": tokens[:, : 5 + int(tokens[0, 0]) % 9]}


def of_any_length() -> Any:
    return OfAnyLength()


class Mixer(torch.nn.Module):
    """A language model that is no decoder: each position sees the mean of those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(Counted.vocab_size, 16)
        self.norm = torch.nn.LayerNorm(16)
        self.up = torch.nn.Linear(16, 36)
        self.down = torch.nn.Linear(36, 16)
        self.head = torch.nn.Linear(16, Counted.vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        positions = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
        x = x.cumsum(dim=1) / positions[:, None]
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        return self.head(x)


def mixer() -> torch.nn.Module:
    return Mixer()


class Matrices(torch.nn.Module):
    """Two matrices and nothing else, for optimizers that take nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(Counted.vocab_size, 16)
        self.head = torch.nn.Linear(16, Counted.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.relu(self.embedding(tokens)))


def matrices() -> torch.nn.Module:
    return Matrices()


class Recurring(torch.nn.Module):
    """The first layer and the last one have the same weight, and the head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(Counted.vocab_size, 16)
        self.layers = torch.nn.Sequential(
            *(torch.nn.Linear(16, 16) for _ in range(3)),
            torch.nn.Linear(16, Counted.vocab_size, bias=False),
        )
        self.layers[2].weight = self.layers[0].weight
        self.layers[3].weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layers(self.embedding(tokens))


def recurring() -> torch.nn.Module:
    return Recurring()


class Routed(torch.nn.Module):
    """One expert of each block sees a micro-batch: which one is the samples' matter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(Counted.vocab_size, 16)
        self.blocks = torch.nn.ModuleList(Experts() for _ in range(2))
        self.head = torch.nn.Linear(16, Counted.vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        x, which = self.embedding(tokens), int(tokens[0, 0])
        for block in self.blocks:
            x = block(x, which)
        return self.head(x)


class Experts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor, which: int) -> Tensor:
        return x + torch.relu(self.experts[which % 4](x))


def routed() -> torch.nn.Module:
    return Routed()


MIXER_PLAN = {"up": "colwise", "down": "rowwise", "hea*": "colwise_rep"}


def cut_mixer(model: torch.nn.Module, mesh: torch.distributed.DeviceMesh) -> None:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh, plan)


class Raising(torch.nn.Module):
    """A decoder whose forward goes wrong once its weights have moved: from the third step on."""

    def __init__(self, result: float | None) -> None:
        super().__init__()
        self.inner = Decoder(DecoderConfig(300, 1, 32, 2, 1, 64, 16))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self._result = result

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.inner(tokens)
        self.calls += 1
        if int(self.calls) > 8:
            if self._result is None:
                raise ArithmeticError("on purpose")
            logits = logits * self._result
        return logits


def raising() -> torch.nn.Module:
    return Raising(None)


def diverging() -> torch.nn.Module:
    return Raising(float("nan"))


def stillborn() -> Any:
    """A dataset that ends the worker which opens it."""
    os._exit(3)


def missing_after(mark: str, **corpus: Any) -> Any:
    """The samples of a corpus, as long as the file ``mark`` is not there: a mount that went."""
    bundle = open_dataset(DataConfig(**corpus), 3)
    if Path(mark).exists():
        raise DataError(f"{mark}: no such mount")
    samples: Any = bundle.train
    samples.vocab_size, samples.sequence_length = bundle.vocab_size, bundle.sequence_length
    return samples
