"""Context parallelism: which models' positions ranks can share, and that they do from now on.

What attention is then: ``models.context_parallel``; of transformers models, by way of their own
interface: ``models.foreign_attention``.
"""

from __future__ import annotations

from torch import nn

from elastic_ft.engines.pipeline import NOISES
from elastic_ft.engines.tensor_parallel import check_no_dropout
from elastic_ft.errors import ConfigError
from elastic_ft.models.context_parallel import ContextShare
from elastic_ft.models.decoder import Attention, Decoder, DecoderStage
from elastic_ft.models.experts import MixtureDecoder, MixtureOfExperts
from elastic_ft.models.foreign_attention import attend_over_ranks, why_not_shared
from elastic_ft.models.stages import PrunedStage

KEY = "parallel.cp"  # of the job file, for messages


def check_context_parallel(model: nn.Module, ranks: int) -> None:
    """Raises ConfigError, one line, for a model whose positions ranks can't share."""
    if ranks == 1 or isinstance(model, Decoder | MixtureDecoder):
        return
    if (why := why_not_shared(model)) is not None:
        raise ConfigError(f"{KEY}: {why}")
    check_no_dropout(model, KEY, "ranks would draw the same of other positions", NOISES)


def share_positions(part: nn.Module, context: ContextShare) -> None:
    """From now on ``part``, a model or a stage of one, takes this rank's positions alone."""
    part.context = context  # type: ignore[assignment]
    if not isinstance(part, Decoder | DecoderStage | MixtureDecoder):
        attend_over_ranks(part.pruned if isinstance(part, PrunedStage) else part, context)
        return
    for module in part.modules():
        if isinstance(module, Attention | MixtureOfExperts):
            module.context = context
