"""A transformers model cut into pipeline stages, by what its own plan says of its parts.

A stage is the model without what other stages have: in the place of each layer, norm, embedding and
head that is not its own stands a module that passes on what it is given. So the model's own
``forward`` runs, with its masks and rotations, and parameters keep the names that they have in the
whole model.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from elastic_ft.errors import ConfigError, one_line
from elastic_ft.models.context_parallel import ContextShare
from elastic_ft.models.loss import cross_entropy_sum

KEY = "parallel.pp"  # of the job file, for messages
_PROBE_BT = (2, 3)


class PassThrough(nn.Module):
    """In the place of a module that another stage has: returns what it is given first."""

    def __init__(self, instead_of: nn.Module) -> None:
        super().__init__()
        for name, value in vars(instead_of).items():  # by which a model may choose a layer's mask
            if isinstance(value, str | int | float) and name not in vars(self):
                setattr(self, name, value)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x


@dataclass(frozen=True, slots=True)
class Parts:
    """Names of the modules that a model is made of, one after the other.

    Attributes:
        layers: each of them.
        before, after: what else hidden states go through: dropout, norms.
    """

    embedding: str
    before: tuple[str, ...]
    layers: tuple[str, ...]
    after: tuple[str, ...]
    head: str

    @property
    def ends(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Of the first stage, of the last one."""
        return (self.embedding, *self.before), (*self.after, self.head)

    @property
    def names(self) -> tuple[str, ...]:
        first, last = self.ends
        return (*first, *self.layers, *last)


def parts_of(model: nn.Module) -> Parts | None:
    """By ``pp_plan`` of a transformers model; None without one, or if it has other parts."""
    plan: Mapping[str, Any] = getattr(model, "pp_plan", None) or {}
    modules, found = dict(model.named_modules()), defaultdict[str, list[str]](list)
    if not plan.keys() <= modules.keys():
        return None
    for name, (received, returned) in plan.items():
        if "input_ids" in received:
            found["embedding"].append(name)
        elif "logits" in returned:
            found["head"].append(name)
        elif isinstance(modules[name], nn.ModuleList):
            found["layers"].append(name)
        else:
            found["after" if found["layers"] else "before"].append(name)
    if any(len(found[kind]) != 1 for kind in ("embedding", "layers", "head")):
        return None
    (embedding,), (layers,), (head,) = found["embedding"], found["layers"], found["head"]
    listed = tuple(f"{layers}.{name}" for name, _ in modules[layers].named_children())
    return Parts(embedding, tuple(found["before"]), listed, tuple(found["after"]), head)


def stage_costs(model: nn.Module) -> list[int]:
    """As ``Decoder.stage_costs``; of experts, those that a token goes through."""
    parts = _parts_of(model)
    costs = [active_parameters(model.get_submodule(name), model) for name in parts.layers]
    costs[-1] += active_parameters(model.get_submodule(parts.head), model)
    return costs


def active_parameters(module: nn.Module, model: nn.Module) -> int:
    """How many of ``module`` a token goes through: of a mixture's experts, some."""
    config: Any = model.config
    per_token = getattr(config, "num_experts_per_tok", None)
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    used = per_token / experts if per_token and experts else 1.0
    named = module.named_parameters()
    return round(sum(p.numel() * (used if ".experts." in f".{n}" else 1.0) for n, p in named))


class PrunedStage(nn.Module):
    """Consecutive layers of a transformers model; the first stage embeds, the last one projects.

    Attributes:
        known_as: of parameters, those that the whole model has by another name: a tied head.
    """

    context: ContextShare | None = None
    shares_positions = False  # among tensor-parallel ranks
    loss_chunk_tokens = None
    length = 0  # the model takes any

    def __init__(self, whole: nn.Module, layers: range) -> None:
        super().__init__()
        self._parts = parts = _parts_of(whole)
        count = len(parts.layers)
        self._first, self._last = layers.start == 0, layers.stop == count
        others = [name for index, name in enumerate(parts.layers) if index not in layers]
        for is_here, end in zip((self._first, self._last), parts.ends, strict=True):
            others += () if is_here else end
        pruned = _without(whole, whole, others)
        self._pruned = (pruned,)  # not a child: its children are, by their own names
        for name, child in pruned.named_children():
            self.add_module(name, child)
        self._own = tuple(parts.layers[index] for index in layers)
        head, embedding = f"{parts.head}.weight", f"{parts.embedding}.weight"
        self.known_as = {head: embedding} if is_tied(whole) else {}
        config = pruned.config.get_text_config()
        self.dim, self.vocabulary = config.hidden_size, config.vocab_size
        self.tp_plan = getattr(whole, "tp_plan", None)

    @property
    def pruned(self) -> nn.Module:
        """The model of transformers that it is, without what other stages have."""
        return self._pruned[0]

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return [self.get_submodule(name) for name in self._own]

    @property
    def embedding(self) -> nn.Module | None:
        return self.get_submodule(self._parts.embedding) if self._first else None

    @property
    def output(self) -> nn.Module | None:
        return self.get_submodule(self._parts.head) if self._last else None

    def train(self, mode: bool = True) -> PrunedStage:
        self._pruned[0].train(mode)
        return super().train(mode)

    def forward(self, x: Tensor, **more: Tensor) -> Tensor:
        """Of tokens int64 [B, T] or what the stage before returned [B, T, D]; ``more``: masks and
        positions, as the whole model takes them; with ``context`` those of this rank's."""
        given = {"input_ids" if self._first else "inputs_embeds": x}
        pruned: Any = self._pruned[0]
        if self._last:
            return pruned(**given, **more, use_cache=False).logits  # type: ignore[no-any-return]
        return pruned.base_model(**given, **more, use_cache=False).last_hidden_state  # type: ignore[no-any-return]

    def loss_sum(self, output: Tensor, targets_BT: Tensor) -> Tensor:
        """Of what the last stage has returned, the sum of the cross-entropy."""
        return cross_entropy_sum(output, targets_BT)


def is_tied(model: nn.Module) -> bool:
    """Whether the head of a model with parts is its embedding."""
    parts = _parts_of(model)
    ends = (model.get_submodule(name) for name in (parts.embedding, parts.head))
    embedding, head = (getattr(end, "weight", None) for end in ends)
    return embedding is head


def check_stages(model: nn.Module) -> None:
    """Raises ConfigError for a model that is more than its parts, one after the other."""
    kind, parts = type(model).__name__, parts_of(model)
    if parts is None:
        raise ConfigError(
            f"{KEY}: stages are of the built-in decoder (model.preset), and of transformers models "
            f"with a plan for pipelines (pp_plan), which {kind} has not"
        )
    if getattr(model.config, "output_router_logits", False):
        raise ConfigError(
            f"{KEY}: model.transformers.output_router_logits: the routers' loss is of all layers "
            "together, and stages have some each; leave it out, or pp: 1"
        )
    inside = tuple(f"{name}." for name in parts.names)
    kept = dict(model.named_parameters(remove_duplicate=False))
    known = kept.keys() | model.state_dict().keys()
    for name in sorted(known):
        if not name.startswith(inside):
            raise ConfigError(
                f"{KEY}: {kind}: no stage would have {name}, which pp_plan leaves out"
            )
    places: dict[int, set[str]] = defaultdict(set)
    ends = {f"{parts.embedding}.weight", f"{parts.head}.weight"}
    for name, parameter in kept.items():
        places[id(parameter)].add(name)
    for names in places.values():
        if len(names) > 1 and names != ends:
            shared = " and ".join(sorted(names)[:2])
            raise ConfigError(f"{KEY}: {kind}: {shared} are one weight, and may be in two stages")
    _check_passes_on(model, parts)


def _check_passes_on(model: nn.Module, parts: Parts) -> None:
    """That a model without layers and norm returns what it is given as ``inputs_embeds``: some
    scale it, or take more than one value from each layer."""
    base: Any = model.base_model
    config: Any = model.config
    dim = config.get_text_config().hidden_size
    x_BTD = torch.linspace(-1, 1, dim * _PROBE_BT[0] * _PROBE_BT[1], device="cpu")
    x_BTD = x_BTD.reshape(*_PROBE_BT, dim)
    try:
        with torch.device("cpu"), torch.no_grad():
            empty = _without(base, model, parts.names).to_empty(device="cpu")
            found = empty(inputs_embeds=x_BTD, use_cache=False).last_hidden_state
        good, problem = torch.equal(found, x_BTD), "other values"
    except Exception as error:  # of another's code, with modules that are not what it expects
        good, problem = False, one_line(error)
    if not good:
        raise ConfigError(
            f"{KEY}: {type(model).__name__} can't be cut between its layers: without them it does "
            f"not pass on what it is given ({problem})"
        )


def _without(module: nn.Module, whole: nn.Module, others: Sequence[str]) -> Any:
    """A copy of ``module`` with another in the place of each of ``others``, named as in ``whole``,
    which are not copied."""
    left_out = [whole.get_submodule(name) for name in others]
    return copy.deepcopy(module, {id(other): PassThrough(other) for other in left_out})


def _parts_of(model: nn.Module) -> Parts:
    parts = parts_of(model)
    assert parts is not None, f"{type(model).__name__} was checked"
    return parts
