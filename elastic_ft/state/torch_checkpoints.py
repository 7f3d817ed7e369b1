"""Checkpoints for plain PyTorch: a reader for torch.distributed.checkpoint, and exports.

Names are the checkpoint's: ``model.<name>``, ``optim.<name>.<key>``, ``engine.<name>``. Exports,
and the reader beside the checkpoint's own, have torch's names for the optimizer's state, as
``torch.distributed.checkpoint.state_dict.get_state_dict`` makes them: ``optim.state.<name>.<key>``.
"""

from __future__ import annotations

import warnings
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, WriteItem
from torch.futures import Future

from elastic_ft.core.manifest import Manifest, TensorSpec
from elastic_ft.core.sharding import Box
from elastic_ft.errors import ElasticError, StorageError
from elastic_ft.storage.inspect import find_one
from elastic_ft.storage.shards import Reader, Want, batched_by_size

STAGED_BYTES = 2**30  # at most so much is read before it is copied to where it belongs


class CheckpointReader(dcp.StorageReader):
    """Lets ``torch.distributed.checkpoint.load`` read a committed checkpoint, into any layout.

    ``load({"model": model.state_dict()}, storage_reader=CheckpointReader(url))`` fills plain and
    distributed tensors; each rank reads just the entries that it needs of, every digest checked.
    ``load(model.state_dict(), ...)`` works too. Where a state dict has keys that no checkpoint
    holds (a tied tensor's second name, ``param_groups``) give
    ``planner=DefaultLoadPlanner(allow_partial_load=True)``.

    Args:
        url: a checkpoint folder under any fsspec URL, or the URL of one manifest.
        step: of the checkpoint; the newest one by default.

    ``load`` raises StorageError if there is none, StateDamaged if a digest is not right.
    """

    def __init__(self, url: str | PathLike[str], step: int | None = None) -> None:
        self._url = fspath(url)
        self._step = step
        self._reader: Reader | None = None
        self._names: dict[str, str] = {}

    def reset(self, checkpoint_id: str | PathLike[str] | None = None) -> None:
        self._reader = None
        if checkpoint_id:
            self._url = fspath(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self._reader = find_one(self._url, self._step)
        self._names = _names(self._reader.manifest)
        tensors = self._reader.manifest.tensors
        return Metadata({name: _described(tensors[own]) for name, own in self._names.items()})

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return LoadPlan(plan.items, self._opened().url, plan.planner_data)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        urls = sorted({plan.storage_data for plan in plans})
        if len(urls) > 1:  # one was published while the ranks were looking
            raise StorageError(f"ranks found different newest checkpoints: {', '.join(urls)}")
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        reader = self._opened()
        for batch in batched_by_size(plan.items, self._nbytes, STAGED_BYTES):
            wants, staged = [], []
            for item in batch:
                want, target, buffer = self._want(item, planner)
                wants.append(want)
                staged.append((item, target, buffer))
            reader.read(wants)
            for item, target, buffer in staged:
                if buffer is not target:
                    target.copy_(buffer)
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _opened(self) -> Reader:
        assert self._reader is not None, "read_metadata comes first"
        return self._reader

    def _nbytes(self, item: ReadItem) -> int:
        return item.lengths.numel() * _dtype(self._spec(item)).itemsize

    def _spec(self, item: ReadItem) -> TensorSpec:
        return self._opened().manifest.tensors[self._names[item.storage_index.fqn]]

    def _want(
        self, item: ReadItem, planner: LoadPlanner
    ) -> tuple[Want, torch.Tensor, torch.Tensor]:
        """What to read, the tensor that it is for, and the one that it is read into."""
        target = planner.resolve_tensor(item).detach()
        dtype = _dtype(self._spec(item))
        direct = target.is_contiguous() and target.device.type == "cpu" and target.dtype == dtype
        buffer = target if direct else torch.empty(tuple(item.lengths), dtype=dtype)
        box = Box(tuple(item.storage_offsets), tuple(item.lengths))
        return Want(self._names[item.storage_index.fqn], box, _bytes_of(buffer)), target, buffer

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | PathLike[str]) -> bool:
        return True


def _names(manifest: Manifest) -> dict[str, str]:
    """Each name that can be asked for -> the checkpoint's own, which wins where both exist."""
    names: dict[str, str] = {}
    for own in manifest.tensors:
        names.setdefault(own.removeprefix("model."), own)
        names.setdefault(".".join(_torch_path(own)), own)
    return names | {own: own for own in manifest.tensors}


def _torch_path(own: str) -> list[str]:
    """Where torch keeps a tensor in its nested state dict."""
    kind, _, name = own.partition(".")
    if kind != "optim":
        return [kind, name]
    parameter, _, key = name.rpartition(".")
    return ["optim", "state", parameter, key]


def _dtype(spec: TensorSpec) -> torch.dtype:
    found = getattr(torch, spec.dtype, None)
    if not isinstance(found, torch.dtype):
        raise StorageError(f"this torch has no {spec.dtype}")
    return found


def _described(spec: TensorSpec) -> TensorStorageMetadata:
    """One chunk, the whole: DCP then asks for boxes of it, and ``Reader`` finds the entries."""
    size = torch.Size(spec.shape)
    whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
    return TensorStorageMetadata(TensorProperties(dtype=_dtype(spec)), size, [whole])


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


# ------------------------------------------------------------------------------- exports


def export_torch(reader: Reader, path: Path, weights_only: bool = False) -> int:
    """Writes one ``torch.save`` file, which ``torch.load(path, weights_only=True)`` reads.

    ``{"model": {name: tensor}, "optim": {"state": {name: {key: tensor}}}}``; all of it is in memory
    once. Returns bytes of tensors. Raises StateDamaged, StoreFailed.
    """
    names = _chosen(reader.manifest, weights_only)
    tensors = {name: _empty(reader.manifest.tensors[name]) for name in names}
    reader.read(Want(n, Box.whole(t.shape), _bytes_of(t)) for n, t in tensors.items())
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        torch.save(_nested(tensors), partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return sum(tensor.nbytes for tensor in tensors.values())


def export_dcp(reader: Reader, folder: Path, weights_only: bool = False) -> int:
    """Writes a folder that plain ``torch.distributed.checkpoint.load`` reads, a file per tensor.

    One tensor is in memory at a time. Returns bytes of tensors. Raises StateDamaged, StoreFailed.
    """
    names = _chosen(reader.manifest, weights_only)
    tensors = {name: _empty(reader.manifest.tensors[name], "meta") for name in names}
    planner = _Streaming(reader, {".".join(_torch_path(name)): name for name in names})
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=False, overwrite=False)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is")
            dcp.save(_nested(tensors), storage_writer=writer, planner=planner, no_dist=True)
    except dcp.CheckpointException as error:
        for cause, _ in error.failures.values():
            if isinstance(cause, ElasticError):
                raise cause from None
        raise
    return sum(tensor.nbytes for tensor in tensors.values())


class _Streaming(dcp.DefaultSavePlanner):
    """Plans for tensors on meta, and reads each when it is its turn to be written."""

    def __init__(self, reader: Reader, names: dict[str, str]) -> None:
        super().__init__()
        self._reader, self._names = reader, names

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        name = self._names[write_item.index.fqn]
        tensor = _empty(self._reader.manifest.tensors[name])
        self._reader.read([Want(name, Box.whole(tensor.shape), _bytes_of(tensor))])
        return tensor


def _chosen(manifest: Manifest, weights_only: bool) -> list[str]:
    return [n for n in manifest.tensors if n.startswith("model.") or not weights_only]


def _empty(spec: TensorSpec, device: str = "cpu") -> torch.Tensor:
    return torch.empty(spec.shape, dtype=_dtype(spec), device=device)


def _nested(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for name, tensor in tensors.items():
        *path, last = _torch_path(name)
        place = state
        for part in path:
            place = place.setdefault(part, {})
        place[last] = tensor
    return state
