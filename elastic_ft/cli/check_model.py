"""Preflight of model, data and optimizer: they are made, on meta, and fit together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from elastic_ft.cli.check_stores import TensorTable
from elastic_ft.config import Job
from elastic_ft.errors import ConfigError, ModelError, StorageError, StoreFailed
from elastic_ft.worker.forked import uncollected

if TYPE_CHECKING:
    from torch import nn

    from elastic_ft.data.dataset import Dataset


@dataclass(frozen=True, slots=True)
class ModelAndData:
    """What is known of a job's once they were made.

    Attributes:
        samples, data, fingerprint: of the training data: how many, in words, and as DataBundle's.
        digest: of model.pretrained.
        tensors: dtype and shape of all that a checkpoint holds of the model.
        parameters: how many numbers.
        remarks: for people.
    """

    samples: int
    data: str
    fingerprint: str | None
    digest: str | None
    tensors: TensorTable
    parameters: int
    remarks: tuple[str, ...]


def check_model_and_data(job: Job) -> ModelAndData:
    """Raises UsageError."""
    with uncollected():
        import torch

        from elastic_ft.data.dataset import open_dataset
        from elastic_ft.engines.laid_out import check_data, check_parallel
        from elastic_ft.engines.learning_rates import check_groups
        from elastic_ft.engines.pretrained import with_model_read
        from elastic_ft.models.build import build_model

    job, digest = with_model_read(job)
    bundle = open_dataset(job.data, job.seed)
    with torch.device("meta"):
        model = build_model(
            job.model, vocab_size=bundle.vocab_size, sequence_length=bundle.sequence_length
        )
    count = sum(parameter.numel() for parameter in model.parameters())
    check_parallel(job, model, bundle.sequence_length)
    check_data(job, bundle.train)
    check_groups(job.optimizer, model)
    check_optimizer(job, model)
    check_returns(job, model, bundle.train)
    if job.parallel.strategy == "auto":
        from elastic_ft.controller.planning import planning_of

        check_data(job, bundle.train, planning_of(job).limits.shared)
    if job.parallel.engine == "deepspeed":
        from elastic_ft.engines.deepspeed import check_parameters

        check_parameters(model)
    persistent = model.state_dict().keys()
    by_reference = job.model.lora is not None
    tensors: dict[str, Any] = {
        n: p for n, p in model.named_parameters() if p.requires_grad or not by_reference
    }
    tensors |= {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    table = {
        f"model.{name}": (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in tensors.items()
    }
    remarks = few_samples(job, len(bundle.train))
    if job.model.weights is not None:
        key = "model.weights" if digest is None else "model.pretrained"
        remarks += check_weights(job.model.weights, model, key, job.model.lora is not None)
    samples, in_words = len(bundle.train), bundle.description
    return ModelAndData(samples, in_words, bundle.fingerprint, digest, table, count, remarks)


def check_returns(job: Job, model: nn.Module, samples: Dataset) -> None:
    """Raises ModelError if the model, on meta, returns something else than a loss. One that can't
    run there, or samples that can't be read, are the workers' to find out."""
    from torch import device, no_grad

    from elastic_ft.engines.modules import to_device
    from elastic_ft.models.loss import loss_and_named

    if job.model.path is None:
        return
    try:
        some = [samples[i] for i in range(min(job.batch.micro_batch_size, len(samples)))]
        batch = samples.collate(some)
        check_arguments(model, batch)
        with no_grad():
            loss_and_named(model, to_device(batch, device("meta")))
    except ModelError as error:
        raise ModelError(f"model.path: {error}") from None
    except Exception:  # of the user's code, which may raise anything
        return


def check_arguments(model: nn.Module, batch: Any) -> None:
    """Raises ModelError if ``forward`` does not take what a micro-batch gives it."""
    import inspect

    from elastic_ft.models.loss import TOKEN_KEYS

    if isinstance(batch, dict) and batch.keys() & TOKEN_KEYS:
        return
    taken = inspect.signature(model.forward)
    try:
        if isinstance(batch, dict):
            taken.bind(**batch)
        else:
            taken.bind(*batch if isinstance(batch, tuple | list) else (batch,))
    except TypeError as error:
        given = f"keys {', '.join(map(str, batch))}" if isinstance(batch, dict) else "no keys"
        raise ModelError(
            f"forward({', '.join(taken.parameters)}) does not take what the dataset gives "
            f"({given}): {error}"
        ) from None


def few_samples(job: Job, samples: int) -> tuple[str, ...]:
    """A warning, if a step has a sample more than once."""
    batch = job.batch.global_batch_size
    if samples >= batch:
        return ()
    return (
        f"batch.global_batch_size: {batch} is more than the {samples} training samples: "
        "a step has some of them more than once",
    )


def check_weights(
    url: str, model: nn.Module, key: str = "model.weights", frozen_only: bool = False
) -> tuple[str, ...]:
    """Whether the folder has all of the model, or what is frozen of it. Returns remarks.

    Raises ModelError, StorageError.
    """
    from elastic_ft.engines.initial_weights import differences, match
    from elastic_ft.storage.safetensors import open_folder

    try:
        folder = open_folder(url)
        config = folder.config()
    except (StorageError, StoreFailed) as error:
        raise StorageError(f"{key}: {error}") from None
    specs = {name: stored.spec for name, stored in folder.tensors.items()}
    matched = match(model, specs, folder.url, key, frozen_only)
    if key != "model.weights":  # config.json is the model's
        return matched.remarks
    return (*differences(config, model, folder.url), *matched.remarks)


def check_optimizer(job: Job, model: nn.Module) -> None:
    """Makes one for ``model``, which may be on meta, and rehearses what is not known to be good.

    Raises ConfigError.
    """
    from functools import partial

    from elastic_ft.engines import rehearsal
    from elastic_ft.engines.learning_rates import learning_rate
    from elastic_ft.engines.optimizers import make_optimizer
    from elastic_ft.errors import one_line
    from elastic_ft.models.imports import import_object

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
    plain_sgd = config.name == "sgd" and not config.kwargs.get("fused")  # not of DTensors
    if config.name in ("adamw", "adam") or (native and plain_sgd):
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
