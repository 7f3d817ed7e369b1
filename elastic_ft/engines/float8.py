"""Products of linear layers by float8, through torchao: an optional part.

A converted layer is still an ``nn.Linear`` with the same float32 weight: names, state, cuts and
optimizers do not know of it. Scales are those of the numbers at hand (dynamic), so there is nothing
to keep. What has no kernel for it, the CPU, computes what one would by rounding to float8 first.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from elastic_ft.config import Job
from elastic_ft.core.layouts.layout import OF_LAYERS
from elastic_ft.errors import ConfigError
from elastic_ft.models.experts import MixtureDecoder

MULTIPLE = 16  # of rows and columns, for the kernels
HEADS = ("output", "lm_head")  # outside of layers: logits are computed in full
CAPABILITY = {"tensorwise": (8, 9), "rowwise": (9, 0)}


def check_float8(job: Job, model: nn.Module) -> None:
    """Raises ConfigError where the model, converted or not yet, or this installation has nothing to
    compute by float8."""
    if job.precision.fp8 is None:
        return
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError("precision.fp8: needs torchao: pip install 'elastic-ft[fp8]'")
    if isinstance(model, MixtureDecoder):
        raise ConfigError("precision.fp8: not with a mixture of experts (model.preset)")
    multiple = _multiple(job)
    parts = dict(model.named_modules())
    is_converted = any(type(part).__module__.startswith("torchao.") for part in parts.values())
    mixtures = _mixtures(model)
    if not is_converted and not any(_is_wanted(parts[n], n, multiple, mixtures) for n in parts):
        each = f" ({MULTIPLE} for each of parallel.{OF_LAYERS})" if _ranks(job) > 1 else ""
        raise ConfigError(
            f"precision.fp8: no linear layer of {type(model).__name__} has torch's own forward and "
            f"sizes in multiples of {multiple}{each}"
        )


def converting(
    job: Job, device: torch.device, factory: Callable[[], nn.Module], tokens_per_sample: int = 1
) -> Callable[[], nn.Module]:
    """What makes the job's model, as ``factory`` does, ready to be cut. Raises ConfigError for a
    GPU that has no kernels.

    Gradients of weights are sums over a micro-batch's tokens. Of another number than kernels take,
    or of one that is not known, it is filled up with zeros, for which everything is copied once
    more.
    """
    kind = job.precision.fp8
    if kind is None:
        return factory
    if device.type == "cuda":
        found, wanted = torch.cuda.get_device_capability(device), CAPABILITY[kind]
        if found < wanted:
            sm, least = (f"sm_{major}{minor}" for major, minor in (found, wanted))
            raise ConfigError(f"precision.fp8: {kind} needs a GPU of {least} or newer, found {sm}")

    def make() -> nn.Module:
        model = factory()
        check_float8(job, model)
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        known = tokens_per_sample % _ranks(job) == 0  # a sequence is longer, where ranks share it
        known &= job.data.path is None  # else a batch may be as long as its samples happen to be
        tokens = job.batch.micro_batch_size * (tokens_per_sample if known else 1)
        config = replace(
            Float8LinearConfig.from_recipe_name(kind),
            emulate=device.type == "cpu",
            pad_inner_dim=tokens % MULTIPLE != 0,
        )
        wanted = partial(_is_wanted, multiple=_multiple(job), mixtures=_mixtures(model))
        convert_to_float8_training(model, module_filter_fn=wanted, config=config)
        return model

    return make


def _ranks(job: Job) -> int:
    """That share each layer: no others share a sample here."""
    return job.parallel.wish.ranks_per_sample


def _multiple(job: Job) -> int:
    """Of rows and columns, which tensor-parallel ranks share out: as many as the job wishes for,
    so that the same layers are converted in each world."""
    return MULTIPLE * _ranks(job)


def _is_wanted(part: nn.Module, name: str, multiple: int, mixtures: Collection[str]) -> bool:
    return (
        isinstance(part, nn.Linear)
        and type(part).forward is nn.Linear.forward  # which is what torchao puts another one for
        and not _makes_logits(name)
        and not _is_of_mixture(name, mixtures)
        and part.in_features % multiple == 0
        and part.out_features % multiple == 0
    )


def _mixtures(model: nn.Module) -> Collection[str]:
    """Names of what holds experts, beside which some of transformers' have a layer that says which
    of them a token goes to."""
    found = (name.rpartition(".") for name, _ in model.named_modules())
    return {parent for parent, _, last in found if last == "experts"}


def _is_of_mixture(name: str, mixtures: Collection[str]) -> bool:
    """Whether it is an expert's, or a router's."""
    path = name.split(".")
    for depth, part in enumerate(path):
        if part in ("experts", "router", "gate") and ".".join(path[:depth]) in mixtures:
            return True
    return False


def _makes_logits(name: str) -> bool:
    """What a layer calls its output is no head: layers are in a list, each by its number."""
    *path, last = name.split(".")
    return last in HEADS and not any(part.isdecimal() for part in path)
