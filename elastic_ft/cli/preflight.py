"""Finds what the user can fix before anything starts: no process, no run folder, no cluster.

Cheap checks come first, so that most mistakes are answered without importing torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_ft.cli import extensions
from elastic_ft.cli.check_model import ModelAndData, check_model_and_data
from elastic_ft.cli.check_stores import check_apart, check_checkpoint, check_owner, check_writable
from elastic_ft.cli.progress import saying_if_long
from elastic_ft.cli.where import Where
from elastic_ft.config import Job, LoopConfig
from elastic_ft.config.elastic import ElasticConfig
from elastic_ft.core.layouts.layout import MODEL_DIMENSIONS
from elastic_ft.core.terms import data_terms, terms_of
from elastic_ft.errors import ConfigError
from elastic_ft.transport.tls import find_openssl

CONNECT_TIMEOUT_S = 5.0
PORT_MAX = 65535
HEAD_TIMEOUT_S = 10.0  # for its first word
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # of gRPC


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


def check_job(
    job: Job,
    out: str,
    where: Where,
    chaos: str | None = None,
    accept_changes: bool = False,
    meanwhile: Callable[[], None] = lambda: None,
    made: Callable[[Job], ModelAndData] = check_model_and_data,
) -> Checked:
    """Raises UsageError, one line that names the key and says why. Changes nothing.

    Args:
        out: the run folder, any fsspec URL.
        chaos: a fault scenario; without one, the job's own.
        accept_changes: go on from a checkpoint that was trained under other terms, or another name.
        meanwhile: called once the cheap checks are done, before torch is imported.
        made: makes model and data, as ``check_model_and_data`` does.
    """
    check_workers(job, where)
    if job.network.tls:
        find_openssl()
    if job.parallel.compile and where.address is None:
        check_compiler_here(job)
    if where.address is not None:
        check_address(where.address)
    scenario = _load_scenario(job, where, chaos)
    url = job.checkpoint.url or f"{out.rstrip('/')}/checkpoints"
    check_writable("run folder (--out)", out)
    warnings = one_worker(job)
    if job.checkpoint.url is not None:
        warnings += check_writable("checkpoint.url", url)
        check_apart(out, url)
    if not accept_changes:
        check_owner(job, out, url)
    meanwhile()
    if job.loop is not None:
        faults = None if scenario is None else _arm(scenario, chaos or job.faults.scenario)
        return Checked(url, 0, _check_script(job.loop, where), 0, faults, warnings)
    found = _made(job, made)
    warnings += found.remarks
    terms = {} if accept_changes else _terms(job, found)
    check_checkpoint(url, found.tensors, terms, job.steps)
    return Checked(
        checkpoint_url=url,
        samples=found.samples,
        data=found.data,
        parameters=found.parameters,
        faults=None if scenario is None else _arm(scenario, chaos or job.faults.scenario),
        warnings=warnings,
    )


def _made(job: Job, made: Callable[[Job], ModelAndData]) -> ModelAndData:
    """The user's code may take its time: it is said which is imported. Where it takes the process
    along, Python says in which line."""
    if not faulthandler.is_enabled():
        with contextlib.suppress(OSError, ValueError, RuntimeError):  # stderr may be no file
            faulthandler.enable(all_threads=False)
    of = f" ({', '.join(imports)})" if (imports := job.imports()) else ""
    with saying_if_long(f"model and data are made, to check them{of}"):
        return made(job)


def _terms(job: Job, found: ModelAndData) -> dict[str, Any]:
    terms = terms_of(job.model_dump(mode="json"))
    return terms | data_terms(found.samples, found.fingerprint, found.digest)


def _check_script(loop: LoopConfig, where: Where) -> str:
    """Returns it in words. Raises ConfigError where this machine would not find it."""
    if loop.script is None:
        raise ConfigError("loop.script: required here: the file whose loop trains")
    if where.address is None and not Path(loop.script).is_file():
        raise ConfigError(f"loop.script: {loop.script} is no file")
    return " ".join((loop.script, *loop.arguments))


def check_workers(job: Job, where: Where) -> None:
    elastic, parallel = job.elastic, job.parallel
    if where.slots is not None and elastic.min_workers > where.slots:
        raise ConfigError(
            f"elastic.min_workers: {elastic.min_workers} workers are needed, "
            f"{where} has room for {where.slots}"
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
            f"parallel.shard_size: {parallel.shard_size} is greater than {_max_workers(elastic)}"
        )
    wish, asked = parallel.wish, " x ".join(f"parallel.{name}" for name in MODEL_DIMENSIONS)
    if wish.ranks_per_sample > elastic.max_workers:
        given = {name: getattr(wish, name) for name in MODEL_DIMENSIONS}
        sizes = " x ".join(f"parallel.{name} {size}" for name, size in given.items() if size > 1)
        raise ConfigError(f"{sizes.replace(' ', ': ', 1)} is greater than {_max_workers(elastic)}")
    each = job.multiple_of
    if elastic.max_workers // each * each < elastic.min_workers:
        raise ConfigError(
            f"elastic.multiple_of: no multiple of {each} ({asked}) is between "
            f"min_workers {elastic.min_workers} and max_workers {elastic.max_workers}"
        )
    check_engine(job)


def _max_workers(elastic: ElasticConfig) -> str:
    is_default = "max_workers" not in elastic.model_fields_set
    return f"elastic.max_workers {elastic.max_workers}{', its default' if is_default else ''}"


def one_worker(job: Job) -> tuple[str, ...]:
    """What a job asks for that one worker alone does not do, as a warning."""
    parallel = job.parallel
    if job.elastic.max_workers > 1 or parallel.strategy != "fsdp":
        return ()
    key, *_ = *parallel.wish.shared, "strategy"
    return (
        f"parallel.{key}: {getattr(parallel, key)} shares nothing out on one worker: "
        f"{_max_workers(job.elastic)}",
    )


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


def check_compiler_here(job: Job) -> None:
    """On this machine, where its workers run. Raises ConfigError."""
    from elastic_ft.engines import compiling  # imports torch, for seconds

    compiling.check_compiler(job.parallel.wants_gpu)


def check_address(address: str) -> None:
    """Whether a head answers there: Ray itself would try for a quarter of an hour. Raises
    ConfigError."""
    if address == "auto":  # Ray looks for a cluster of this machine, and says at once
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal() or int(port) > PORT_MAX:
        raise ConfigError(f"--address: expected HOST:PORT or auto, found {address!r}")
    try:
        with socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S) as head:
            _await_answer(head, address)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"--address: no Ray cluster at {address}: {reason}") from None


def _await_answer(head: socket.socket, address: str) -> None:
    """Whatever it says, or that it hangs up (on who knows no TLS): a process that stands still does
    neither. Raises ConfigError."""
    head.settimeout(HEAD_TIMEOUT_S)
    try:
        head.sendall(GREETING)
        head.recv(1)
    except ConnectionError:
        return
    except TimeoutError:
        silent = f"does not answer within {HEAD_TIMEOUT_S:g} s: it may stand still"
        raise ConfigError(f"--address: who listens at {address} {silent}") from None


# ------------------------------------------------------------------------------- faults


def _load_scenario(job: Job, where: Where, chaos: str | None) -> Any | None:
    key = "--chaos" if chaos is not None else "faults.scenario"
    name = chaos if chaos is not None else job.faults.scenario
    if name is None:
        return None
    try:
        scenario = extensions.faults().load_scenario(name)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None
    for fault in scenario.external:
        if not where.is_ours:
            raise ConfigError(f"{key}: {name}: cannot {fault}: {where} is not ours to break")
        if not where.has_raylets and "processes" not in fault.tiers:
            lacks = "network" if scenario.needs_network else "raylets"
            raise ConfigError(f"{key}: {name}: cannot {fault}: {where} has no {lacks}")
    if (
        scenario.needs_network
        and where.has_raylets
        and (lacks := extensions.faults().network_lacks())
    ):
        raise ConfigError(f"{key}: {name}: {lacks}")
    return scenario


def _arm(scenario: Any, name: str | None) -> Any:
    try:
        return extensions.faults().arm(scenario)
    except ConfigError as error:
        raise ConfigError(f"fault scenario {name}: {error}") from None
