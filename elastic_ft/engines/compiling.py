"""Layers compiled one by one: before they are cut, with every hook outside, warmed up early.

Of a layer with experts, all before these: what routers choose is of another size each time.

All layers of a model are one graph. FSDP has a layer's weights whole as it runs, so that neither
another world nor a module that is built anew compiles again: torch keeps what it has compiled by
the code of ``forward``, for as long as the process lives (I6), and on the node's disk for the next
one. With tensor parallelism a graph is of one world, too (torch compares the mesh): those of the
largest worlds are made early, and the first step in another one traces again, and finds on disk
what that compiles to.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from elastic_ft import torch_private
from elastic_ft.config import Job
from elastic_ft.core.layouts.layout import OF_LAYERS, Layout
from elastic_ft.engines.activations import checkpoint_activations
from elastic_ft.engines.base import Compiled
from elastic_ft.engines.modules import DTYPES, mixed_precision, to_empty
from elastic_ft.engines.tensor_parallel import parallelize_block
from elastic_ft.errors import ConfigError, UsageError
from elastic_ft.groups.groups import make_mesh
from elastic_ft.models.decoder import Decoder, rotations, who_attends
from elastic_ft.models.experts import MixtureBlock, MixtureDecoder

# Of one forward, over all generations: masked batches, precision, worlds. torch refuses any more.
GRAPHS_MAX = 64
FORMS_MAX = 4  # that are compiled early: each takes tracing, and with nothing on disk compiling


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
        setattr(part, name, partial(_within_limits, compiled))


def _within_limits(compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return compiled(*args, **kwargs)
    except Exception as error:
        if not torch_private.has_too_many_graphs(error):
            raise
        raise UsageError(
            f"parallel.compile: batches have had more than {GRAPHS_MAX} shapes, each of which is "
            "compiled; pad them to fewer lengths, or leave compile out"
        ) from error


@dataclass(frozen=True, slots=True)
class LayerForm:
    """What a layer is in a world: one graph.

    Attributes:
        mesh: of a world in which ranks share layers, its layout. Else no graph has a world in it.
        whole: by DDP, which computes in lower precision by autocast.
        sharded: by FSDP2.
    """

    mesh: Layout
    whole: bool
    sharded: bool


def compiled_layers(
    module: nn.Module, layers: Sequence[nn.Module], job: Job, shared: bool
) -> Sequence[nn.Module]:
    """Compiles ``layers`` of ``module``, and recomputes their activations, as the job asks. Returns
    what is in their place.

    Recomputation is in the graph; of layers that ranks share (``shared``) around it, if all of one
    is recomputed: torch 2.13 would keep a mesh for backward, where it takes tensors alone.
    """
    parallel = job.parallel
    again = parallel.activation_checkpointing
    around = parallel.compile and shared and again is True
    if around:
        compile_blocks(layers)
    if again:
        layers = checkpoint_activations(module, layers, again)
    if parallel.compile and not around:
        compile_blocks(layers)
    return layers


class Compiler:
    """What one process has compiled, and when."""

    def __init__(self, job: Job, device: torch.device) -> None:
        check_compiler(device.type == "cuda")
        torch_private.set_up_compiler(GRAPHS_MAX)
        self._job, self._device = job, device
        self._warmed: tuple[int, float] | None = (0, 0.0)  # graphs, seconds; None: told
        self._seen = self._kept_since = torch_private.compiled_graphs()

    def begin_layout(self) -> None:
        """Nothing runs. Graphs of worlds that are gone go, before torch would refuse any more."""
        graphs = torch_private.compiled_graphs()
        many = graphs - self._kept_since >= GRAPHS_MAX // 2
        if many and self._job.parallel.cuts_layers:
            torch.compiler.reset()
            self._kept_since = graphs

    def warm_up(self, factory: Callable[[], nn.Module], forms: Sequence[LayerForm]) -> None:
        """Compiles one layer of what ``factory`` makes, forward and backward, of shapes as in a
        step: with no group, and while nobody waits. In each of the first ``forms``."""
        began_s = time.monotonic()
        for form in forms[:FORMS_MAX]:
            with torch.device("meta"):
                model = factory()
            assert isinstance(model, Decoder | MixtureDecoder)
            self._compile_layer(model, form)
        graphs = torch_private.compiled_graphs()
        self._warmed = graphs - self._seen, time.monotonic() - began_s
        self._seen = graphs

    def _compile_layer(self, model: Decoder | MixtureDecoder, form: LayerForm) -> None:
        """As rank 0 of a world has it: others of its ranks find its graph theirs, too."""
        dtype = DTYPES[self._job.precision.dtype]
        holder: nn.ModuleList = nn.ModuleList([model.layers[0]])
        if isinstance(layer := holder[0], MixtureBlock):
            layer.ffn = Unmixed()
        given = torch.float32 if form.whole else dtype
        x, turns, attends = self._inputs(model, given, form.mesh.parts_per_layer)
        autocast = form.whole and dtype is not torch.float32
        with contextlib.ExitStack() as stack:
            if form.sharded or form.mesh.cuts_layers:
                stack.enter_context(torch_private.pretended_world(form.mesh.world_size))
                mesh = make_mesh(form.mesh, self._device)
            if form.mesh.cuts_layers:
                parallelize_block(holder[0], mesh[OF_LAYERS])
            (layer,) = compiled_layers(holder, [*holder], self._job, form.mesh.cuts_layers)
            if form.sharded:  # FSDP2 makes other classes of modules, and code is compiled for one
                fully_shard(layer, mesh=mesh["dp_shard"], mp_policy=mixed_precision(dtype))
            to_empty(holder, self._device)
            with torch.autocast(self._device.type, dtype=dtype, enabled=autocast):
                out = layer(x, turns, attends=attends)
            (out[0] if isinstance(out, tuple) else out).sum().backward()

    def _inputs(
        self, model: Decoder | MixtureDecoder, dtype: torch.dtype, sharing: int
    ) -> tuple[Any, ...]:
        """As ``Decoder.forward`` gives them to a layer, whose ``sharing`` ranks have some
        positions each."""
        config, batch = model.config, self._job.batch.micro_batch_size
        length = -(-config.max_sequence_length // sharing) * sharing
        positions = None
        if self._job.data.separate_documents:
            positions = torch.arange(length, device=self._device).expand(batch, length)
        x = torch.zeros(batch, length // sharing, config.dim, dtype=dtype, device=self._device)
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
