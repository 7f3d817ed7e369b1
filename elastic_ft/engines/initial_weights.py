"""Initial weights from a safetensors folder: which tensor is which, and each rank's part of it."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from elastic_ft.core.manifest import TensorSpec
from elastic_ft.core.sharding import Box
from elastic_ft.errors import ModelError
from elastic_ft.models.experts_apart import ALL, EACH, StoredPiece, names_in_files, pieces_of
from elastic_ft.models.lora import name_in_base
from elastic_ft.state.tensors import LocalState, StateTensor, tensor_name
from elastic_ft.storage.safetensors import CONFIG, Rows, SafetensorsFolder

CONVERTED = ("float64", "float32", "float16", "bfloat16")  # into one another; nothing else is
NAMED_MAX = 3  # in a message
APART = "a tensor for each expert, and these are not put together"


@dataclass(frozen=True, slots=True)
class Matched:
    """``sources``: the model's name -> what it is made of. ``remarks``: worth a line each."""

    sources: Mapping[str, tuple[StoredPiece, ...]]
    remarks: tuple[str, ...] = ()


def match(
    model: nn.Module,
    found: Mapping[str, TensorSpec],
    url: str,
    key: str = "model.weights",
    frozen_only: bool = False,
) -> Matched:
    """Finds each parameter and persistent buffer of ``model`` (on meta will do) in a folder.

    A tied tensor may have any of its names. A transformers model's may lack the prefix of the base
    model, as files of a base model do; a mixture's may be a tensor for each expert.
    ``frozen_only``: of a model with adapters, what they are put into, by the names that it has
    without them.

    Raises ModelError, one line with the first NAMED_MAX that are missing, of another shape, or of
    a dtype that is not converted.
    """
    names, tensors = _by_identity(model, frozen_only)
    base = f"{getattr(model, 'base_model_prefix', '')}."
    sources: dict[str, tuple[StoredPiece, ...]] = {}
    taken: set[str] = set()
    problems: list[str] = []
    conversions: Counter[tuple[str, str]] = Counter()
    for identity, tied in names.items():
        known = [name_in_base(name) for name in tied] if frozen_only else tied
        candidates = [*known, *(name.removeprefix(base) for name in known)]
        shape = tuple(tensors[identity].shape)
        pieces = _pieces(candidates, shape, found, taken)
        if pieces is None:
            apart = ALL in known[0] and any(EACH in name for name in found)
            problems.append(f"{known[0]} is {'there as ' + APART if apart else 'missing'}")
            continue
        dtype = str(tensors[identity].dtype).removeprefix("torch.")
        for piece in pieces:
            taken.add(piece.name)
            if piece.at and piece.at[0] >= shape[0]:
                problems.append(f"{piece.name} is there, the model has {shape[0]} experts")
            elif problem := _problem(piece, found.get(piece.name), dtype):
                problems.append(problem)
            elif (stored := found[piece.name].dtype) != dtype:
                conversions[stored, dtype] += 1
        sources |= dict.fromkeys(tied, pieces)  # the state has one of the names
    if problems:
        raise ModelError(f"{key}: {url}: {_some(problems, '; ')}")
    remarks = [f"{n} of the tensors converted from {a} to {b}" for (a, b), n in conversions.items()]
    used = taken.union(sources)
    if unused := sorted(found.keys() - used):
        remarks.append(f"not used, for the model has no such tensors: {_some(unused, ', ')}")
    return Matched(sources, tuple(f"{key}: {url}: {remark}" for remark in remarks))


def _pieces(
    candidates: list[str], shape: tuple[int, ...], found: Mapping[str, TensorSpec], taken: set[str]
) -> tuple[StoredPiece, ...] | None:
    """Of the first of a tensor's names that the folder has, under another one or in pieces."""
    for name in candidates:
        for called in names_in_files(name):
            if called in found and called not in taken:
                return (StoredPiece(called, shape),)
        if pieces := pieces_of(name, shape, found):
            return pieces
    return None


def _problem(piece: StoredPiece, spec: TensorSpec | None, dtype: str) -> str:
    """Why it can't be read into a tensor of ``dtype``; "" if it can."""
    if spec is None:
        return f"{piece.name} is missing"
    if spec.shape != piece.shape:
        return f"{piece.name} is {list(spec.shape)}, the model has {list(piece.shape)}"
    if spec.dtype != dtype and not {spec.dtype, dtype} <= set(CONVERTED):
        return f"{piece.name} is {spec.dtype}, the model has {dtype}"
    return ""


def _by_identity(
    model: nn.Module, frozen_only: bool
) -> tuple[dict[int, list[str]], dict[int, Tensor]]:
    """All names of each tensor, and the tensor."""
    names: dict[int, list[str]] = defaultdict(list)
    tensors: dict[int, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and not (frozen_only and tensor.requires_grad):
            names[id(tensor)].append(name)
            tensors[id(tensor)] = tensor
    return names, tensors


# What changes the result and no tensor's shape: names of Hugging Face's configurations, and ours.
SETTINGS = {
    "rms_norm_eps": "norm_eps",
    **{name: name for name in ("rope_theta", "rope_type", "layer_norm_eps", "layer_norm_epsilon")},
    **{name: name for name in ("hidden_act", "activation_function", "sliding_window", "factor")},
    **{name: name for name in ("partial_rotary_factor", "attn_logit_softcapping")},
    **{name: name for name in ("final_logit_softcapping", "query_pre_attn_scalar")},
}


def differences(config: Mapping[str, Any], model: nn.Module, url: str) -> tuple[str, ...]:
    """Where a folder's configuration contradicts the model's: a remark for each such setting.

    Tensors of the same shapes would be taken, and be another model's: norms, rotations and
    activations are in no tensor.
    """
    own = getattr(model, "config", None)
    if dataclasses.is_dataclass(own) and not isinstance(own, type):
        has = dataclasses.asdict(own)
    else:
        has = own.to_dict() if hasattr(own, "to_dict") else {}
    theirs, ours = _flat(config), _flat(has)
    found = []
    for name, alias in SETTINGS.items():
        key = name if name in ours else alias
        if name in theirs and key in ours and theirs[name] != ours[key]:
            found.append(f"{name} is {theirs[name]} there, the model has {key} {ours[key]}")
    return tuple(f"model.weights: {url}/{CONFIG}: {difference}" for difference in found)


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """With the rotation's parameters, which are nested in some versions."""
    flat = {name: value for name, value in config.items() if value is not None}
    for nested in ("rope_scaling", "rope_parameters"):
        if isinstance(config.get(nested), Mapping):
            flat |= config[nested]
    return flat


def _some(items: list[str], separator: str) -> str:
    more = f" and {len(items) - NAMED_MAX} more" if len(items) > NAMED_MAX else ""
    return separator.join(items[:NAMED_MAX]) + more


def load(
    folder: SafetensorsFolder, model: nn.Module, state: LocalState
) -> tuple[int, tuple[str, ...]]:
    """Fills the ``model.*`` tensors of ``state``, reading just the rows that it holds of each.

    Returns bytes read and the remarks of ``match``. Raises ModelError as it does, StoreFailed.
    """
    specs = {name: stored.spec for name, stored in folder.tensors.items()}
    matched = match(model, specs, folder.url)
    return fill(folder, matched, state), matched.remarks


def fill(folder: SafetensorsFolder, matched: Matched, state: LocalState) -> int:
    """As ``load``, of a folder whose tensors are known. Returns bytes read. Raises StoreFailed."""
    specs = {name: stored.spec for name, stored in folder.tensors.items()}
    targets: dict[str, dict[int, _Target]] = defaultdict(dict)  # and by the row after its last
    named: dict[str, str] = {}
    wants: list[Rows] = []
    for key, target in state.items():
        if not key.startswith("model.") or not target.box.numel:
            continue
        name = tensor_name(key).removeprefix("model.")
        for piece in matched.sources[name]:
            first, stop = _rows_in(piece, target.box)
            if first >= stop:
                continue
            same = named.setdefault(piece.name, name) == name
            assert same, f"{name} and another tensor of the state are tied"
            targets[piece.name][stop] = (target, piece)
            wants.append(Rows(piece.name, first, stop))
    with torch.no_grad():
        return folder.read(wants, lambda rows, data: _fill(targets, specs, rows, data))


_Target = tuple[StateTensor, StoredPiece]


def _rows_in(piece: StoredPiece, box: Box) -> tuple[int, int]:
    """[first, stop) of ``piece`` that lie in ``box`` of the model's tensor; a scalar has one."""
    if not box.sizes:
        return 0, 1
    dim = len(piece.at)
    spans = [(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True)]
    if not all(a <= index < b for index, (a, b) in zip(piece.at, spans, strict=False)):
        return 0, 0
    first, stop = (min(max(edge - piece.row, 0), piece.shape[0]) for edge in spans[dim])
    return first, stop


def _fill(
    targets: Mapping[str, Mapping[int, _Target]],
    specs: Mapping[str, TensorSpec],
    rows: Rows,
    data: memoryview,
) -> None:
    spec, parts = specs[rows.tensor], targets[rows.tensor]
    target, piece = parts[min(stop for stop in parts if stop >= rows.stop)]
    part = torch.frombuffer(bytearray(data), dtype=getattr(torch, spec.dtype))
    with torch.no_grad():  # of this thread
        if not spec.shape:
            target.local.copy_(part.reshape(()))
            return
        box, dim = target.box, len(piece.at)
        at = tuple(index - o for index, o in zip(piece.at, box.offsets, strict=False))
        first = piece.row + rows.start - box.offsets[dim]
        spans = zip(box.offsets[dim + 1 :], box.sizes[dim + 1 :], strict=True)
        inside = tuple(slice(o, o + n) for o, n in spans)
        local = target.local[(*at, slice(first, first + rows.stop - rows.start))]
        local.copy_(part.reshape(-1, *spec.shape[1:])[(slice(None), *inside)])
