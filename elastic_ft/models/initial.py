"""Initial values of large tensors, part by part: each rank makes what it holds and nothing else.

A large tensor is made of blocks of rows, and each block's values are a function of (seed, name,
number of the block): equal in every layout, whoever makes them. How a model fills its parameters is
recorded while it is built of fake tensors, as the operations that it does to each one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from elastic_ft.core.sharding import Box
from elastic_ft.torch_private import FakeTensorMode, TorchDispatchMode

BLOCK_ELEMENTS = 1 << 18  # of a block, if that is not less than a row
SINGLE_ELEMENTS = 1 << 22  # tensors of up to so many are one block
# What one operation does to each element, whatever the others are.
POINTWISE = {"normal_", "uniform_", "zero_", "fill_", "mul_", "add_", "sub_", "div_", "clamp_"}
POINTWISE |= {
    "_no_grad_trunc_normal_",
    "clamp_min_",
    "clamp_max_",
    "erfinv_",
    "neg_",
    "exp_",
    "log_",
    "exponential_",
}
# What leaves nothing of what was there before.
OVERWRITING = {"normal_", "uniform_", "zero_", "fill_", "exponential_"}

Fill = Callable[[Tensor, torch.Generator], object]  # of a tensor, in place


def generator_of(seed: int, name: str, block: int | None = None) -> torch.Generator:
    text = f"{seed}/{name}" if block is None else f"{seed}/{name}/{block}"
    digest = hashlib.sha256(text.encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def draw(
    seed: int, name: str, shape: Sequence[int], box: Box, fill: Fill, dtype: torch.dtype
) -> Tensor:
    """The part in ``box`` of a CPU tensor of ``shape`` that ``fill`` fills, block by block."""
    whole = Box.whole(tuple(shape))
    if math.prod(shape) <= SINGLE_ELEMENTS:
        values = torch.empty(tuple(shape), dtype=dtype, device="cpu")
        fill(values, generator_of(seed, name))
        return values[box.slices_within(whole)]
    rest = tuple(shape[1:])
    rows = max(1, BLOCK_ELEMENTS // math.prod(rest))
    part = torch.empty(box.sizes, dtype=dtype, device="cpu")
    if not box.numel:
        return part
    begin, end = box.offsets[0], box.offsets[0] + box.sizes[0]
    inner = box.slices_within(whole)[1:]
    for block in range(begin // rows, -(-end // rows)):
        first, last = block * rows, min((block + 1) * rows, shape[0])
        values = torch.empty(last - first, *rest, dtype=dtype, device="cpu")
        fill(values, generator_of(seed, name, block))
        low, high = max(first, begin), min(last, end)
        part[low - begin : high - begin] = values[(slice(low - first, high - first), *inner)]
    return part


@dataclass(frozen=True, slots=True)
class Operation:
    """One that fills a tensor in place from nothing but numbers.

    Attributes:
        view: sizes, strides and offset of the part of the tensor that it fills; None: all of it.
    """

    function: Any
    arguments: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)
    view: tuple[Sequence[int], Sequence[int], int] | None = None

    @property
    def is_pointwise(self) -> bool:
        return self.view is None and _name(self.function) in POINTWISE

    def __call__(self, tensor: Tensor, generator: torch.Generator) -> None:
        keywords = dict(self.keywords)
        if _takes_generator(self.function):
            keywords["generator"] = generator
        part = tensor if self.view is None else tensor.as_strided(*self.view)
        self.function(part, *self.arguments, **keywords)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a tensor is filled."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    operations: tuple[Operation, ...]

    def part(self, seed: int, name: str, box: Box) -> Tensor:
        """In blocks; of the whole tensor where an operation is not of each element by itself."""
        if all(operation.is_pointwise for operation in self.operations):
            return draw(seed, name, self.shape, box, self._fill, self.dtype)
        values = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        self._fill(values, generator_of(seed, name))
        return values[box.slices_within(Box.whole(self.shape))]

    def _fill(self, values: Tensor, generator: torch.Generator) -> None:
        for operation in self.operations:
            operation(values, generator)


def recorded(model_factory: Callable[[], nn.Module]) -> tuple[nn.Module, Recorder]:
    """The model, of fake tensors, and how it has filled them. Raises whatever it raises of them."""
    recorder, seed = Recorder(), torch.random.fork_rng(devices=[])
    with seed, torch.device("cpu"), torch.no_grad(), FakeTensorMode(), recorder:
        return model_factory(), recorder


class Recorder(TorchDispatchMode):
    """Writes down how fake tensors that are made meanwhile are filled.

    Not tensors on meta: several functions of ``torch.nn.init`` do nothing to those.
    """

    def __init__(self) -> None:
        super().__init__()
        self._operations: dict[int, list[Operation] | None] = {}  # by storage; None: not known
        self._seen: list[Tensor] = []  # an address must not be used twice

    def __enter__(self) -> Recorder:
        # It draws until it is content, which fake values can't tell.
        self._truncated, nn.init._no_grad_trunc_normal_ = (
            nn.init._no_grad_trunc_normal_,
            self._truncated_normal,
        )
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *exception: Any) -> None:
        nn.init._no_grad_trunc_normal_ = self._truncated
        super().__exit__(*exception)

    def _truncated_normal(
        self, tensor: Tensor, *args: float, generator: torch.Generator | None = None
    ) -> Tensor:
        if not (tensor.is_contiguous() and _is_whole(tensor)):
            self._operations[_storage(tensor)] = None
        else:
            self._operations[_storage(tensor)] = [Operation(self._truncated, args)]
        return tensor

    def recipe(self, tensor: Tensor) -> Recipe | None:
        operations = self._operations.get(_storage(tensor))
        whole = tensor.is_contiguous() and _is_whole(tensor)
        if operations is None or not whole:
            return None
        return Recipe(tuple(tensor.shape), tensor.dtype, tuple(operations))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        result = func(*args, **keywords)
        if func._schema.is_mutable:
            self._filled(func, args, keywords)
        elif isinstance(result, Tensor):
            self._seen.append(result)
            if (made := _made(func, args)) is not None:
                self._operations[_storage(result)] = made
        return result

    def _filled(self, func: Any, args: Sequence[Any], keywords: Mapping[str, Any]) -> None:
        first, *rest = args
        given = [*rest, *keywords.values()]
        numbers = not any(isinstance(value, Tensor | list | tuple) for value in given)
        if not isinstance(first, Tensor) or not numbers:
            for tensor in _tensors([first, *keywords.values()]):
                self._operations[_storage(tensor)] = None
            return
        view = None
        if not (first.is_contiguous() and _is_whole(first)):
            view = first.size(), first.stride(), int(first.storage_offset())
        plain = {key: value for key, value in keywords.items() if key != "generator"}
        operation = Operation(func, tuple(rest), plain, view)
        if view is None and _name(func) in OVERWRITING:
            self._operations[_storage(first)] = [operation]
        elif (before := self._operations.get(_storage(first))) is not None:
            before.append(operation)


def _made(func: Any, args: Sequence[Any]) -> list[Operation] | None:
    """What the tensor is filled with that ``func`` returns; None for all but the best known."""
    aten = torch.ops.aten
    kind = _name(func).removeprefix("new_").removesuffix("_like")
    if kind in ("zeros", "ones"):
        return [Operation(aten.fill_.Scalar, (float(kind == "ones"),))]
    if kind == "full" and isinstance(args[1], int | float):
        return [Operation(aten.fill_.Scalar, (args[1],))]
    if kind == "randn":
        return [Operation(aten.normal_.default, (0.0, 1.0))]
    if kind == "rand":
        return [Operation(aten.uniform_.default, (0.0, 1.0))]
    return None


def _name(func: Any) -> str:
    schema = getattr(func, "_schema", None)
    return func.__name__ if schema is None else str(schema.name).removeprefix("aten::")


def _takes_generator(func: Any) -> bool:
    schema = getattr(func, "_schema", None)
    return schema is None or any(argument.name == "generator" for argument in schema.arguments)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _is_whole(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
