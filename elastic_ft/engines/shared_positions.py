"""Context parallelism: which models' positions ranks can share, and that they do from now on.

What attention is then: ``models.context_parallel``, or by heads, ``models.ulysses``; of
transformers models, by way of their own interface: ``models.foreign_attention``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from elastic_ft.config import Job, ParallelConfig
from elastic_ft.core.layouts.layout import Layout, trades_heads
from elastic_ft.engines.modules import DTYPES
from elastic_ft.engines.pipeline import NOISES
from elastic_ft.engines.tensor_parallel import check_no_dropout
from elastic_ft.errors import ConfigError
from elastic_ft.models.context_parallel import ContextShare
from elastic_ft.models.decoder import Attention, Decoder, DecoderStage
from elastic_ft.models.experts import MixtureDecoder, MixtureOfExperts
from elastic_ft.models.foreign_attention import attend_over_ranks, why_not_shared
from elastic_ft.models.stages import PrunedStage
from elastic_ft.models.ulysses import HeadShare

KEY = "parallel.cp"  # of the job file, for messages
FLASH_CAPABILITY = 8  # the least major one of a GPU that has flash attention


def check_context_parallel(model: nn.Module, parallel: ParallelConfig, parts: int = 1) -> None:
    """Raises ConfigError, one line, for a model whose positions ranks can't share as asked.
    ``parts``: into how many tensor parallelism cuts each layer."""
    if parallel.cp == 1:
        return
    if isinstance(model, MixtureDecoder) and parallel.wish.has_stages:
        raise ConfigError(f"{KEY}: stages of a mixture (model.preset) have whole sequences")
    if not isinstance(model, Decoder | MixtureDecoder):
        if (why := why_not_shared(model)) is not None:
            raise ConfigError(f"{KEY}: {why}")
        check_no_dropout(model, KEY, "ranks would draw the same of other positions", NOISES)
    heads, cp = heads_of(model), parallel.cp
    if parallel.cp_method == "ulysses" and not trades_heads("ulysses", heads, parts, cp):
        raise ConfigError(
            f"{KEY}_method: ulysses gives each rank as many heads, and cp {cp} x tp {parts} do not "
            f"divide {heads}; auto gathers keys and values where that is so"
        )


def check_kernels(job: Job, device: torch.device) -> None:
    """Raises ConfigError where the device has no kernel for ranks that share positions."""
    if job.parallel.cp == 1 or device.type != "cuda":
        return
    if DTYPES[job.precision.dtype] is torch.float32:
        raise ConfigError(f"{KEY}: on GPUs needs precision.dtype bf16 or fp16, found fp32")
    if not torch.cuda.is_available():
        return  # a controller's machine, whose workers' it can't know
    major, minor = torch.cuda.get_device_capability(device)
    if major < FLASH_CAPABILITY:
        least = f"sm_{FLASH_CAPABILITY}0"
        raise ConfigError(f"{KEY}: needs a GPU of {least} or newer, found sm_{major}{minor}")


def heads_of(part: Any) -> int:
    """Of each layer's queries, over all ranks."""
    config = (part.pruned if isinstance(part, PrunedStage) else part).config
    ours = isinstance(part, Decoder | DecoderStage | MixtureDecoder)
    return int(config.n_heads if ours else config.num_attention_heads)


def share_of_positions(
    part: nn.Module, parallel: ParallelConfig, layout: Layout, group: dist.ProcessGroup
) -> ContextShare:
    """This rank's, of ``group``, for ``part`` of a model."""
    parts = layout.parts_per_layer
    by_heads = trades_heads(parallel.cp_method, heads_of(part), parts, layout.cp)
    return (HeadShare if by_heads else ContextShare)(group, parts)


def share_positions(part: nn.Module, context: ContextShare) -> None:
    """From now on ``part``, a model or a stage of one, takes this rank's positions alone."""
    part.context = context  # type: ignore[assignment]
    if not isinstance(part, Decoder | DecoderStage | MixtureDecoder):
        attend_over_ranks(part.pruned if isinstance(part, PrunedStage) else part, context)
        return
    for module in part.modules():
        if isinstance(module, Attention | MixtureOfExperts):
            module.context = context
