"""What is done to the modules of a model, whatever lays it out."""

from __future__ import annotations

import contextlib
import copy
import random
from collections import defaultdict
from collections.abc import Iterator, MutableMapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from elastic_ft import torch_private
from elastic_ft.faults import Reach

CHECKPOINT_PREFIX = "_checkpoint_wrapped_module."
BUCKET_MB = 25  # torch's own
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def to_empty(module: nn.Module, device: torch.device) -> None:
    """``module.to_empty``, which by itself makes several tensors of a tied one."""
    places: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for part in module.modules():
        for name, tensor in chain(
            part.named_parameters(recurse=False), part.named_buffers(recurse=False)
        ):
            places[id(tensor)].append((part, name))
    module.to_empty(device=device)
    for (first, first_name), *others in places.values():
        for part, name in others:
            setattr(part, name, getattr(first, first_name))


def in_ddp(
    module: nn.Module, device: torch.device, *, sync_buffers: bool = False
) -> DistributedDataParallel:
    """DDP around ``module``, whose state comes through the transfer.

    Its first bucket is small by default (1 MB), so that sums begin soon. On a CPU they would do so
    on the cores that still compute, and another all-reduce from each of 4 ranks is a dozen messages
    more: there it is as large as the others.
    """
    return DistributedDataParallel(
        module,
        init_sync=False,
        gradient_as_bucket_view=True,
        bucket_cap_mb=BUCKET_MB if device.type == "cpu" else None,
        **torch_private.buffer_sync(sync_buffers),
    )


def mixed_precision(dtype: torch.dtype) -> MixedPrecisionPolicy:
    """FSDP2's, to compute in ``dtype``; gradients are reduced in float32."""
    if dtype is torch.float32:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)


def plain_name(name: str) -> str:
    return name.replace(CHECKPOINT_PREFIX, "")


def seed_for(seed: int, step: int, micro_batch: int) -> None:
    """Seeds dropout and the like by what is computed, not by who computes it (I3).

    Not by ``torch.manual_seed``: without a GPU it takes a stack trace for each kind that there
    might be: 0.2 ms a call, beside 1 us.
    """
    value = ((seed * 1_000_003 + step) * 100_003 + micro_batch) % (1 << 64)
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(value)


def seed_all_for(seed: int, step: int, micro_batch: int) -> None:
    """Also the generators of numpy and ``random``, from which a user's code may draw."""
    seed_for(seed, step, micro_batch)
    value = torch.default_generator.initial_seed()
    random.seed(value)
    np.random.seed((value ^ value >> 32) & 0xFFFFFFFF)  # of a list it takes six times as long


class FirstGradients:
    """Announces "reduce" once per step: when the first gradients of a backward are complete."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._announced = False

    def watch(
        self, reach: Reach, blocks: Sequence[nn.Module], parameter: nn.Parameter | None = None
    ) -> None:
        """From now on until the next such call.

        They are those of ``parameter``, or where it is None (FSDP2's and DeepSpeed's parameters
        get theirs past autograd) of the last of ``blocks``.
        """
        self._remove()  # of a step in which nothing arrived
        self._announced = False

        def arrived(_: Any) -> None:
            self._remove()
            if not self._announced:
                self._announced = True
                reach("reduce")

        def entered(_: nn.Module, args: Any, kwargs: Any) -> None:
            for value in (*args, *kwargs.values()):
                if isinstance(value, torch.Tensor) and value.requires_grad:
                    self._handles.append(value.register_hook(arrived))
                    return

        if parameter is not None:
            self._handles.append(parameter.register_hook(arrived))
        elif blocks:
            hook = blocks[-1].register_forward_pre_hook(entered, with_kwargs=True)
            self._handles.append(hook)

    def _remove(self) -> None:
        while self._handles:
            self._handles.pop().remove()


class TermCounts:
    """How many terms losses had: what is on the device is added up there, and asked for once."""

    def __init__(self) -> None:
        self._here = 0
        self._there: torch.Tensor | None = None

    def add(self, count: torch.Tensor | int) -> None:
        if not isinstance(count, torch.Tensor):
            self._here += count
            return
        if self._there is None:  # as an integer that can't overflow, and in memory of our own
            self._there = torch.zeros((), dtype=torch.int64, device=count.device)
        self._there = self._there + count.to(torch.int64)

    def queued(self) -> torch.Tensor | int:
        """To be asked for: if the device counted it, with a wait for that."""
        return self._here if self._there is None else self._there + self._here

    def total(self) -> int:
        """Waits for the device if it counted."""
        return int(self.queued())


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's, of a DTensor; of any other, all. Of many under no_grad: there it costs least."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def same_objects(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(value is b[name] for name, value in a.items())


def to_device(data: Any, device: torch.device, copied: bool = False) -> Any:
    """``data`` with its tensors there, whatever they are in. ``copied``: also those that are."""
    there = partial(to_device, device=device, copied=copied)
    if isinstance(data, torch.Tensor):
        return data.to(device, non_blocking=True, copy=copied)
    if isinstance(data, dict):
        return {key: there(value) for key, value in data.items()}
    if isinstance(data, MutableMapping):  # a tokenizer's batch, say, with names as attributes
        made = copy.copy(data)
        for key, value in data.items():
            made[key] = there(value)
        return made
    move = getattr(data, "to", None)
    if callable(move):
        moved = move(device)  # a tuple, too: torch's PackedSequence keeps a part on the host
        shares = copied and moved is data and isinstance(data, tuple)
        return copy.deepcopy(moved) if shares else moved
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*map(there, data))
    if isinstance(data, (tuple, list)):
        return type(data)(map(there, data))
    return data


@contextlib.contextmanager
def inside(reach: Reach) -> Iterator[None]:
    """Announces "inside_optimizer" between two operations of the optimizer, if anyone listens."""
    interrupt = getattr(reach, "interrupt_operations", None)
    if interrupt is None:
        yield
        return
    with interrupt("inside_optimizer"):
        yield
