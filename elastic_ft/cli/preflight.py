"""Finds what the user can fix before anything starts: no process, no run folder, no cluster.

Cheap checks come first, so that most mistakes are answered without importing torch.
"""

from __future__ import annotations

import os
import posixpath
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic_ft.cli import extensions
from elastic_ft.config import Job
from elastic_ft.core.layouts.layout import MODEL_DIMENSIONS
from elastic_ft.core.terms import Terms, changes, data_terms, refusal, terms_in, terms_of
from elastic_ft.errors import (
    CheckpointMismatch,
    ConfigError,
    StateDamaged,
    StorageError,
    StoreFailed,
    UsageError,
)
from elastic_ft.storage.store import check_access
from elastic_ft.transport.tls import find_openssl

if TYPE_CHECKING:
    from torch import nn

    from elastic_ft.data.dataset import DataBundle

CONNECT_TIMEOUT_S = 5.0
CHECK_DEADLINE_S = 20.0  # of one look into a store
FOLDERS_OF_A_RUN = ("owners", "segments")
FOLDERS_OF_CHECKPOINTS = ("owners", "data", "manifests", "emergency")

TensorTable = dict[str, tuple[str, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a job is about to run.

    Attributes:
        slots: how many workers fit at the start; None if that is not known (a cluster elsewhere).
        address: of a Ray cluster that is there already.
        can_add: whether nodes can be added and killed from here.
        has_raylets: whether nodes have one that can be killed.
    """

    name: str
    slots: int | None = None
    address: str | None = None
    can_add: bool = True
    has_raylets: bool = False


@dataclass(frozen=True, slots=True)
class Checked:
    """What the checks found out on the way.

    Attributes:
        samples: of the training data; in words: ``data``.
        warnings: worth a line, no obstacle.
    """

    checkpoint_url: str
    samples: int
    data: str
    parameters: int
    faults: Any  # a scenario, armed, or None
    warnings: tuple[str, ...] = ()


def check(
    job: Job,
    out: str,
    place: Place,
    chaos: str | None = None,
    accept_changes: bool = False,
    meanwhile: Callable[[], None] = lambda: None,
) -> Checked:
    """Raises UsageError, one line that names the key and says why. Changes nothing.

    Args:
        out: the run folder, any fsspec URL.
        chaos: a fault scenario; without one, the job's own.
        accept_changes: go on from a checkpoint that was trained under other terms, or another name.
        meanwhile: called once the cheap checks are done, before torch is imported.
    """
    check_workers(job, place)
    if job.network.tls:
        find_openssl()
    if place.address is not None:
        check_address(place.address)
    scenario = _load_scenario(job, place, chaos)
    url = job.checkpoint.url or f"{out.rstrip('/')}/checkpoints"
    check_writable("run folder (--out)", out)
    warnings: tuple[str, ...] = ()
    if job.checkpoint.url is not None:
        warnings = check_writable("checkpoint.url", url)
        check_apart(out, url)
    if not accept_changes:
        check_owner(job, out, url)
    meanwhile()
    bundle, tensors, parameters, remarks = _check_model_and_data(job)
    warnings += remarks
    terms = terms_of(job.model_dump(mode="json"))
    terms |= data_terms(len(bundle.train), bundle.fingerprint)
    check_checkpoint(url, tensors, {} if accept_changes else terms)
    check_steps(job.steps, url)
    return Checked(
        checkpoint_url=url,
        samples=len(bundle.train),
        data=bundle.description,
        parameters=parameters,
        faults=None if scenario is None else _arm(scenario, chaos or job.faults.scenario),
        warnings=warnings,
    )


def check_workers(job: Job, place: Place) -> None:
    elastic, parallel = job.elastic, job.parallel
    if place.slots is not None and elastic.min_workers > place.slots:
        raise ConfigError(
            f"elastic.min_workers: {elastic.min_workers} workers are needed, "
            f"{place.name} has room for {place.slots}"
        )
    if parallel.strategy == "hsdp" and parallel.shard_size is None:
        raise ConfigError(
            "parallel.shard_size: required for strategy hsdp: how many ranks share one replica"
        )
    if parallel.strategy != "hsdp" and parallel.shard_size is not None:
        raise ConfigError(
            f"parallel.shard_size: {parallel.shard_size} has no meaning for strategy "
            f"{parallel.strategy}, only for hsdp"
        )
    if parallel.shard_size is not None and parallel.shard_size > elastic.max_workers:
        raise ConfigError(
            f"parallel.shard_size: {parallel.shard_size} is greater than elastic.max_workers "
            f"{elastic.max_workers}"
        )
    wish, asked = parallel.wish, " x ".join(f"parallel.{name}" for name in MODEL_DIMENSIONS)
    if wish.ranks_per_sample > elastic.max_workers:
        sizes = wish.sizes_in_words("parallel.").replace(" ", ": ", 1)
        raise ConfigError(f"{sizes} is greater than elastic.max_workers {elastic.max_workers}")
    each = job.multiple_of
    if elastic.max_workers // each * each < elastic.min_workers:
        raise ConfigError(
            f"elastic.multiple_of: no multiple of {each} ({asked}) is between "
            f"min_workers {elastic.min_workers} and max_workers {elastic.max_workers}"
        )
    check_engine(job)


def check_engine(job: Job) -> None:
    parallel = job.parallel
    deepspeed = parallel.engine == "deepspeed"
    if not deepspeed and parallel.zero_stage is not None:
        raise ConfigError(
            f"parallel.zero_stage: {parallel.zero_stage} has no meaning for engine native, "
            "only for deepspeed"
        )
    if deepspeed and parallel.zero_stage is None:
        raise ConfigError("parallel.zero_stage: required for engine deepspeed: 0, 1, 2 or 3")
    if deepspeed and parallel.strategy != "ddp":
        raise ConfigError(
            f"parallel.strategy: {parallel.strategy} has no meaning for engine deepspeed, "
            "parallel.zero_stage says what is sharded"
        )
    if deepspeed and parallel.wish.ranks_per_sample > 1:
        asked = {name: getattr(parallel, name) for name in MODEL_DIMENSIONS}
        none = " and ".join(f"no {name} ({size})" for name, size in asked.items())
        raise ConfigError(f"parallel.engine: deepspeed has {none} here, native has")
    if parallel.offload_optimizer and not (deepspeed and parallel.zero_stage):
        raise ConfigError(
            "parallel.offload_optimizer: only for engine deepspeed with zero_stage 1, 2 or 3"
        )


def check_address(address: str) -> None:
    """Whether anyone listens there: Ray itself would try for minutes. Raises ConfigError."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():  # "auto": Ray looks for a cluster of this machine, and says at once
        return
    try:
        socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"--address: no Ray cluster at {address}: {reason}") from None


# ------------------------------------------------------------------------------- faults


def _load_scenario(job: Job, place: Place, chaos: str | None) -> Any | None:
    key = "--chaos" if chaos is not None else "faults.scenario"
    name = chaos if chaos is not None else job.faults.scenario
    if name is None:
        return None
    try:
        scenario = extensions.faults().load_scenario(name)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None
    for fault in scenario.external:
        if not place.can_add:
            raise ConfigError(f"{key}: {name}: cannot {fault}: {place.name} is not ours to break")
        if not place.has_raylets and "processes" not in fault.tiers:
            lacks = "network" if scenario.needs_network else "raylets"
            raise ConfigError(f"{key}: {name}: cannot {fault}: {place.name} has no {lacks}")
    if (
        scenario.needs_network
        and place.has_raylets
        and (lacks := extensions.faults().network_lacks())
    ):
        raise ConfigError(f"{key}: {name}: {lacks}")
    return scenario


def _arm(scenario: Any, name: str | None) -> Any:
    try:
        return extensions.faults().arm(scenario)
    except ConfigError as error:
        raise ConfigError(f"fault scenario {name}: {error}") from None


# ------------------------------------------------------------------------------ storage


def check_writable(key: str, url: str) -> tuple[str, ...]:
    """Returns warnings. Raises StorageError. Leaves nothing behind, not even a folder."""
    from elastic_ft.storage.backends import Local, backend_of

    try:
        backend, _ = backend_of(url)
        if isinstance(backend, Local):
            _check_folder(url)
            return ()
        return check_access(url)
    except StorageError as error:
        raise StorageError(f"{key}: {error}") from None


def _check_folder(url: str) -> None:
    """Writes a file where the folder is, or would be made. (Root may write where modes forbid.)"""
    folder = Path(url.removeprefix("file://")).absolute()
    found = next(path for path in (folder, *folder.parents) if path.exists())
    if not found.is_dir():
        raise StorageError(f"{folder}: {found} is not a folder")
    try:
        with tempfile.TemporaryFile(dir=found):
            pass
        if found != folder:  # some filesystems take files and no folders
            Path(tempfile.mkdtemp(prefix=".probe-", dir=found)).rmdir()
    except OSError as error:
        raise StorageError(f"{folder}: cannot write in {found}: {error.strerror}") from None


def check_apart(out: str, url: str) -> None:
    """Raises ConfigError where run folder and checkpoints would take each other's files for theirs:
    both have ``owners``, and marks of who ended and was rescued."""
    from elastic_ft.storage.store import open_store

    folder, checkpoints = (_plain(open_store(where).url) for where in (out, url))
    for key, where, other, taken in (
        ("checkpoint.url", checkpoints, folder, ("", *FOLDERS_OF_A_RUN)),
        ("run folder (--out)", folder, checkpoints, FOLDERS_OF_CHECKPOINTS),
    ):
        for name in taken:
            place = posixpath.join(other, name).rstrip("/")
            if where == place or (name and where.startswith(f"{place}/")):
                whose = "the run folder's" if key == "checkpoint.url" else "checkpoint.url's"
                raise ConfigError(
                    f"{key}: {where} is {whose}{f' {name}/' if name else ''}: each needs a place "
                    "of its own, as checkpoints/ in the run folder is"
                )


def _plain(url: str) -> str:
    """One of the ways to write it."""
    scheme, mark, path = url.rpartition("://")
    return f"{scheme}{mark}{posixpath.normpath(path)}" if mark else os.path.realpath(path)


def check_owner(job: Job, out: str, url: str) -> None:
    """Raises UsageError where the run folder or the checkpoints are another job's."""
    from elastic_ft.storage import owners
    from elastic_ft.storage.store import open_store

    for key, where in (("run folder (--out)", out), ("checkpoint.url", url)):
        try:
            owners.check_job(open_store(where, deadline_s=CHECK_DEADLINE_S), job.name)
        except UsageError as error:
            raise ConfigError(f"{key}: {error}") from None
        except StoreFailed as error:
            raise StorageError(f"{key}: {error}") from None


# ------------------------------------------------------------------------ model, data


def _check_model_and_data(job: Job) -> tuple[DataBundle, TensorTable, int, tuple[str, ...]]:
    """The open data; dtype and shape of every tensor that a checkpoint holds of the model; the
    number of parameters; remarks."""
    import torch

    from elastic_ft.data.dataset import preflight
    from elastic_ft.engines.laid_out import check_data, check_parallel
    from elastic_ft.engines.learning_rates import check_groups
    from elastic_ft.models.build import build_model

    bundle, parameters = preflight(job)
    count = sum(torch.Size(shape).numel() for _, shape in parameters.values())
    with torch.device("meta"):
        model = build_model(
            job.model, vocab_size=bundle.vocab_size, sequence_length=bundle.sequence_length
        )
    check_parallel(job, model, bundle.sequence_length)
    check_data(job, bundle.train)
    check_groups(job.optimizer, model)
    check_optimizer(job, model)
    if job.parallel.strategy == "auto":
        from elastic_ft.controller.planning import planning_of

        planning_of(job)
    if job.parallel.engine == "deepspeed":
        from elastic_ft.engines.deepspeed import check_parameters

        check_parameters(model)
    persistent = model.state_dict().keys()
    tensors: dict[str, Any] = dict(model.named_parameters())
    tensors |= {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    table = {
        f"model.{name}": (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in tensors.items()
    }
    remarks = () if job.model.weights is None else check_weights(job.model.weights, model)
    return bundle, table, count, remarks


def check_weights(url: str, model: nn.Module) -> tuple[str, ...]:
    """Whether the folder has all of the model. Returns remarks. Raises ModelError, StorageError."""
    from elastic_ft.engines.initial_weights import differences, match
    from elastic_ft.storage.safetensors import open_folder

    try:
        folder = open_folder(url)
        config = folder.config()
    except (StorageError, StoreFailed) as error:
        raise StorageError(f"model.weights: {error}") from None
    matched = match(model, {name: t.spec for name, t in folder.tensors.items()}, folder.url)
    return (*differences(config, model, folder.url), *matched.remarks)


def check_optimizer(job: Job, model: nn.Module) -> None:
    """Makes one for ``model``, which may be on meta, and rehearses what is not known to be good.

    Raises ConfigError.
    """
    from functools import partial

    from elastic_ft.engines import rehearsal
    from elastic_ft.engines.learning_rates import learning_rate
    from elastic_ft.engines.optimizers import make_optimizer
    from elastic_ft.models.imports import import_object, one_line

    config, parallel = job.optimizer, job.parallel
    for step in {1, job.steps // 2 + 1, job.steps}:
        learning_rate(config, job.steps, step)
    if ":" in config.name:
        import_object(config.name, "optimizer.name", ConfigError)
    make = partial(make_optimizer, config)
    dimensions = {p.dim() for p in model.parameters() if p.requires_grad}
    native = parallel.engine == "native"
    try:
        make(dict(model.named_parameters()))
    except ConfigError:
        raise
    except Exception as error:  # the user's class may raise anything
        raise ConfigError(f"optimizer.kwargs: {config.name}: {one_line(error)}") from error
    if config.name in ("adamw", "adam") or (native and config.name == "sgd"):
        return
    try:
        sharded = native and (parallel.strategy != "ddp" or parallel.cuts_layers)
        rehearsal.rehearse(make, dimensions, sharded=sharded)
        good = native or rehearsal.begins_with_zeros(make, dimensions)
    except ConfigError:
        raise
    except Exception as error:  # steps are on the CPU here, and may be for GPUs alone there
        if native and parallel.may_use_gpu:
            return
        raise ConfigError(f"optimizer.name: {config.name}: {one_line(error)}") from error
    if not good:
        raise ConfigError(
            f"optimizer.name: {config.name} begins with a state that is not zero: engine "
            "deepspeed can't, native can"
        )


def check_checkpoint(url: str, expected: TensorTable, terms: Terms) -> None:
    """Compares the newest checkpoint with the model, and with the ``terms`` of going on from it.

    Raises CheckpointMismatch, ConfigError.

    A damaged manifest is not refused here: the job falls back to an older one, and says so (I5).
    """
    from elastic_ft.storage import checkpoints, owners
    from elastic_ft.storage.store import open_store
    from elastic_ft.worker.restore import mismatch_message

    store = open_store(url, deadline_s=CHECK_DEADLINE_S)
    try:
        refs = owners.counting(store, checkpoints.committed(store))
        if not refs:
            return
        manifest = checkpoints.load_manifest(store, refs[0])
    except StateDamaged:
        return
    except StoreFailed as error:
        raise StorageError(f"checkpoint.url: {error}") from None
    found = {
        name: (spec.dtype, tuple(spec.shape))
        for name, spec in manifest.tensors.items()
        if name.startswith("model.")
    }
    if found != expected:
        raise CheckpointMismatch(
            f"checkpoint.url: {mismatch_message(refs[0].url, found, expected)}"
        )
    if other := changes(terms_in(manifest.extra), terms):
        raise ConfigError(refusal(other, manifest.step, refs[0].url))


def check_steps(steps: int, url: str) -> None:
    """Raises ConfigError where the run would go on from a later step than its last."""
    from elastic_ft.errors import StoreFailed
    from elastic_ft.observe.outcome import check_resume_point
    from elastic_ft.storage import checkpoints, owners
    from elastic_ft.storage.store import open_store

    store = open_store(url, deadline_s=20)
    try:
        refs = owners.counting(store, checkpoints.committed(store))
    except StoreFailed as error:
        raise StorageError(f"checkpoint.url: {error}") from None
    for newest in refs[:1]:
        check_resume_point(steps, newest.step, newest.url)
