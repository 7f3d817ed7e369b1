"""Tensor parallelism with sequence parallelism for the built-in decoder.

Within a block each rank has some heads and some columns of the feed-forward layer; between blocks
it has some positions, so norms and residuals are shared out as well (Korthikanti et al., 2022).
What blocks hand on is each rank's own positions, a plain tensor.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from elastic_ft.errors import ConfigError
from elastic_ft.models.decoder import Block, Decoder, DecoderStage

POSITIONS, WHOLE = Shard(1), Replicate()


def check_tensor_parallel(model: nn.Module, tp: int, sequence_length: int | None) -> None:
    """Raises ConfigError, one line, for a model that ``tp`` ranks can't share."""
    if tp == 1:
        return
    if not isinstance(model, Decoder):
        raise ConfigError(
            f"parallel.tp: {tp} ranks share the layers of a built-in decoder (model.preset) only, "
            f"found {type(model).__name__}"
        )
    config = model.config
    sizes = {
        "n_heads": config.n_heads,
        "n_kv_heads": config.n_kv_heads,
        "ffn_dim": config.ffn_dim,
        "sequence length": sequence_length or config.max_sequence_length,
    }
    for name, size in sizes.items():
        if size % tp:
            raise ConfigError(f"parallel.tp: {tp} does not divide the model's {name} {size}")


def parallelize(model: Decoder | DecoderStage, mesh: DeviceMesh) -> None:
    """Shares the parameters of ``model`` out over ``mesh``, in place."""
    tied = model.output is not None and model.embedding is not None
    tied = tied and model.output.weight is model.embedding.weight
    for block in model.modules():
        if isinstance(block, Block):
            parallelize_module(block, mesh, _block_plan())
    ends: dict[str, ParallelStyle] = {}
    if model.embedding is not None:
        ends["embedding"] = RowwiseParallel(input_layouts=WHOLE, output_layouts=POSITIONS)
    if model.output is not None:
        ends["norm"] = SequenceParallel()
        ends["output"] = ColwiseParallel(input_layouts=POSITIONS, output_layouts=WHOLE)
    parallelize_module(model, mesh, ends)
    if tied:  # both are cut by rows, the vocabulary
        model.output.weight = model.embedding.weight


def _block_plan() -> dict[str, ParallelStyle]:
    return {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(
            input_layouts=(POSITIONS, None), desired_input_layouts=(WHOLE, None)
        ),
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.output": RowwiseParallel(output_layouts=POSITIONS),
        "ffn_norm": SequenceParallel(),
        "ffn": PrepareModuleInput(input_layouts=(POSITIONS,), desired_input_layouts=(WHOLE,)),
        "ffn.gate": ColwiseParallel(),
        "ffn.up": ColwiseParallel(),
        "ffn.down": RowwiseParallel(output_layouts=POSITIONS),
    }
