"""Layers compiled one by one: before they are cut, with every hook outside, warmed up early.

Of a layer with experts, all before these: what routers choose is of another size each time.

All layers of a model are one graph. FSDP has a layer's weights whole as it runs, so that neither
another world nor a module that is built anew compiles again: torch keeps what it has compiled by
the code of ``forward``, for as long as the process lives (I6), and on the node's disk for the next
one. Nothing here ever resets that.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from elastic_ft import torch_private
from elastic_ft.config import Job
from elastic_ft.engines.activations import checkpoint_activations
from elastic_ft.engines.base import Compiled
from elastic_ft.engines.modules import DTYPES, mixed_precision, to_empty
from elastic_ft.errors import ConfigError
from elastic_ft.models.decoder import Decoder, rotations, who_attends
from elastic_ft.models.experts import MixtureBlock, MixtureDecoder

# Of one forward, over all generations: masked batches, precision. Beyond it torch runs eagerly.
GRAPHS_MAX = 64


def check_compiler(on_gpu: bool) -> None:
    """Raises ConfigError where this machine has nothing to compile with."""
    compiler = os.environ.get("CXX", "g++")
    if on_gpu and importlib.util.find_spec("triton") is None:
        raise ConfigError("parallel.compile: needs triton on GPUs, which is not installed")
    if shutil.which(compiler) is None:
        raise ConfigError(
            f"parallel.compile: needs a C++ compiler, and there is no {compiler} on this machine"
        )


def compile_blocks(blocks: Sequence[nn.Module]) -> None:
    """From now on their forwards are compiled ones. Without a graph break, or not at all."""
    for block in blocks:
        inner = getattr(block, "_checkpoint_wrapped_module", block)
        part, name = (inner, "attended") if isinstance(inner, MixtureBlock) else (block, "forward")
        compiled = torch.compile(getattr(part, name), fullgraph=True, dynamic=False)
        setattr(part, name, compiled)


class Compiler:
    """What one process has compiled, and when."""

    def __init__(self, job: Job, device: torch.device) -> None:
        check_compiler(device.type == "cuda")
        torch_private.set_up_compiler(GRAPHS_MAX)
        self._job, self._device = job, device
        self._warmed: tuple[int, float] | None = (0, 0.0)  # graphs, seconds; None: told
        self._seen = torch_private.compiled_graphs()

    def warm_up(self, model: nn.Module, whole: bool) -> None:
        """Compiles one layer's forward and backward, of shapes as in a step: with no group, and
        while nobody waits. ``whole``: DDP, which computes in lower precision by autocast.
        """
        assert isinstance(model, Decoder | MixtureDecoder)
        began_s = time.monotonic()
        dtype = DTYPES[self._job.precision.dtype]
        holder: nn.ModuleList = nn.ModuleList([model.layers[0]])
        blocks: list[nn.Module] = [*holder]
        if isinstance(layer := holder[0], MixtureBlock):
            layer.ffn = Unmixed()
        if again := self._job.parallel.activation_checkpointing:
            blocks = checkpoint_activations(holder, blocks, again)
        compile_blocks(blocks)
        x, turns, attends = self._inputs(model, torch.float32 if whole else dtype)
        autocast = whole and dtype is not torch.float32
        with contextlib.ExitStack() as stack:
            if not whole:  # FSDP2 makes modules of classes of its own, which code is compiled for
                stack.enter_context(torch_private.pretended_world(1))
                mesh = init_device_mesh(self._device.type, (1,))
                fully_shard(blocks[0], mesh=mesh, mp_policy=mixed_precision(dtype))
            to_empty(holder, self._device)
            with torch.autocast(self._device.type, dtype=dtype, enabled=autocast):
                out = blocks[0](x, turns, attends=attends)
            (out[0] if isinstance(out, tuple) else out).sum().backward()
        graphs = torch_private.compiled_graphs()
        self._warmed = graphs - self._seen, time.monotonic() - began_s
        self._seen = graphs

    def _inputs(self, model: Decoder | MixtureDecoder, dtype: torch.dtype) -> tuple[Any, ...]:
        """As ``Decoder.forward`` gives them to a layer."""
        config, batch = model.config, self._job.batch.micro_batch_size
        length = config.max_sequence_length
        positions = None
        if self._job.data.separate_documents:
            positions = torch.arange(length, device=self._device).expand(batch, length)
        x = torch.zeros(batch, length, config.dim, dtype=dtype, device=self._device)
        theta = config.rope_theta
        turns = rotations(length, config.head_dim, theta, self._device, positions)
        return x.requires_grad_(), turns, who_attends(None, positions)

    def take(self) -> Compiled | None:
        """What a step has compiled; after the first one, also what was before it."""
        graphs = torch_private.compiled_graphs()
        inside, self._seen = graphs - self._seen, graphs
        if not inside and self._warmed is None:
            return None
        warmed, seconds = self._warmed or (0, 0.0)
        self._warmed = None
        return Compiled(inside, warmed, seconds)


def eagerly(compiler: Compiler | None) -> contextlib.AbstractContextManager[Any]:
    """An evaluation has graphs and shapes of its own, and is not worth compiling."""
    if compiler is None:
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")


class Unmixed(nn.Module):
    """In the place of a mixture, which needs room that only a step has."""

    def forward(self, x: torch.Tensor, valid: None) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x.new_zeros(())


def check_compiled(job: Job, model: nn.Module) -> None:
    """Raises ConfigError for a model whose layers are not compiled here."""
    if not job.parallel.compile:
        return
    if not isinstance(model, Decoder | MixtureDecoder):
        raise ConfigError(
            "parallel.compile: is of the built-in decoders (model.preset), found "
            f"{type(model).__name__}"
        )
    if isinstance(model, MixtureDecoder) and job.parallel.activation_checkpointing == "selective":
        raise ConfigError(
            "parallel.compile: of a mixture (model.preset) not with activation_checkpointing "
            "selective, which would see nothing of what is compiled of a layer"
        )
