"""The job file: typed, units in names, unknown keys refused. One source of configuration.

``load_job(path)`` and ``Job.model_validate(dict)`` are the only ways in; ``parse_job`` turns
pydantic's findings into one line (``ConfigError``). The resolved job is saved with the run.
"""

from __future__ import annotations

import difflib
import reprlib
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from elastic_ft.core.layouts.layout import MODEL_DIMENSIONS, LayoutWish, Strategy
from elastic_ft.core.policy import Policy, same_names
from elastic_ft.errors import ConfigError

YEAR_S = 366 * 86400.0
COUNT_MAX = 10**15  # of steps, samples, tokens: beyond all use, and far from overflows
WORKERS_MAX = 10**6
BATCH_MAX = 10**9
SEQUENCE_MAX = 1 << 30
SEED_MAX = (1 << 64) - 1
FILE_BYTES_MAX = 4 << 20  # of a job file
VALUES_MAX = 100_000  # in a job file, aliases resolved
# What PyYAML's constructors let through, as for the date 2024-13-45.
ESCAPES = (ValueError, LookupError, AttributeError, TypeError, RecursionError)
MERGED_MAX = 100  # of merge keys in one mapping
SHOWN = 80  # characters of a value, in a message


Seconds = Annotated[float, Field(ge=1e-3, le=YEAR_S)]  # to wait for something
Delay = Annotated[float, Field(ge=0, le=YEAR_S)]
Count = Annotated[int, Field(ge=1, le=COUNT_MAX)]
CountFrom0 = Annotated[int, Field(ge=0, le=COUNT_MAX)]
Workers = Annotated[int, Field(ge=1, le=WORKERS_MAX)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelConfig(Section):
    """Exactly one of ``preset``, ``path`` and ``transformers``."""

    preset: str | None = None  # a built-in decoder, see elastic_ft.models.decoder.PRESETS
    path: str | None = None  # "package.module:callable" returning an nn.Module
    transformers: dict[str, Any] | None = None  # a Hugging Face config, with its model_type
    kwargs: dict[str, Any] = Field(default_factory=dict)  # for preset and path
    weights: str | None = None  # to begin with: a safetensors folder, any fsspec URL

    @model_validator(mode="after")
    def one_source(self) -> ModelConfig:
        given = [k for k in ("preset", "path", "transformers") if getattr(self, k) is not None]
        if len(given) != 1:
            found = " and ".join(given) if given else "none"
            raise ValueError(f"expected one of preset, path, transformers; found {found}")
        return self


class DataConfig(Section):
    """Token data from a URL, or a map-style dataset by import path."""

    url: str | None = None  # file, folder or glob, any fsspec URL; "stdlib:" = Python's own source
    format: Literal["auto", "text", "jsonl", "parquet", "tokens"] = "auto"
    text_field: str = "text"  # jsonl, parquet
    tokenizer: str | None = None  # a tokenizer.json; none: a BPE is trained on the data
    # Ends each document: of the tokenizer, or an id; none: a usual name.
    end_token: str | Annotated[int, Field(ge=0, lt=1 << 32)] | None = None
    # Documents in one window do not attend to each other, and positions begin anew in each.
    separate_documents: bool = False
    vocab_size: int = Field(4096, ge=258, le=1 << 31)  # of a trained BPE
    token_bytes: Literal[2, 4] = 2  # format "tokens": little-endian unsigned
    sequence_length: int = Field(256, ge=2, le=SEQUENCE_MAX)
    max_tokens: Count | None = None  # use at most this many
    eval_fraction: float = Field(0.02, ge=0, lt=1)  # held out, from the end
    eval_every_steps: CountFrom0 = 0  # 0: never
    eval_samples: Count = 64  # at most so many of the held-out ones
    cache_dir: str = "~/.cache/elastic_ft"  # tokenised data
    path: str | None = None  # "package.module:callable" returning a map-style dataset
    kwargs: dict[str, Any] = Field(default_factory=dict)  # for path

    @model_validator(mode="after")
    def one_source(self) -> DataConfig:
        if (self.url is None) == (self.path is None):
            raise ValueError("expected exactly one of url and path")
        return self

    @model_validator(mode="after")
    def knows_where_documents_end(self) -> DataConfig:
        if self.separate_documents and self.url is None:
            raise ValueError("separate_documents: is of url; a dataset has position_ids in samples")
        unknown = self.format == "tokens" and not (
            isinstance(self.end_token, int) or (self.end_token and self.tokenizer)
        )
        if self.separate_documents and unknown:
            raise ValueError("separate_documents: format tokens needs end_token: an id, say")
        return self


Beta = Annotated[float, Field(ge=0, lt=1)]
Rate = Annotated[float, Field(gt=0, le=1e6)]
Decay = Annotated[float, Field(ge=0, le=1e6)]
SCHEDULES = ("constant", "linear", "cosine", "wsd", "inverse_sqrt")


class ParameterGroup(Section):
    """Parameters by the pattern of their names in the whole model, ``*`` for any part.

    What is not given is as for all others.
    """

    match: str = Field(min_length=1)
    lr: Rate | None = None  # its highest; the schedule shapes it as it does optimizer.lr
    weight_decay: Decay | None = None  # of vectors too


class OptimizerConfig(Section):
    name: str = "adamw"  # adamw, adam, sgd, or "package.module:class"
    lr: Rate = 3e-4
    weight_decay: Decay = 0.1  # of matrices; norms and biases have none
    groups: tuple[ParameterGroup, ...] = ()  # the first whose pattern matches counts
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0, le=1e6)
    kwargs: dict[str, Any] = Field(default_factory=dict)
    # constant, linear, cosine, wsd, inverse_sqrt, or "package.module:callable", which is given
    # (step, steps) and returns what the rate is of lr: a function of these alone.
    schedule: str = "cosine"
    warmup_steps: CountFrom0 = 0
    decay_steps: CountFrom0 = 0  # wsd: the last ones
    min_lr_ratio: float = Field(0.1, ge=0, le=1)
    grad_clip: float | None = Field(1.0, gt=0)  # maximum global norm
    # Steps in a row whose gradients may be infinite or NaN: each is skipped. 0: none may.
    skip_nonfinite: int = Field(0, ge=0, le=10**6)

    @field_validator("schedule")
    @classmethod
    def known(cls, value: str) -> str:
        if value not in SCHEDULES and ":" not in value:
            names = ", ".join(SCHEDULES)
            raise ValueError(f"expected one of {names} or package.module:callable, found {value!r}")
        return value

    @model_validator(mode="after")
    def decays_in_some_steps(self) -> OptimizerConfig:
        if (self.schedule == "wsd") != (self.decay_steps > 0):
            raise ValueError("decay_steps: schedule wsd needs it, and no other schedule has it")
        return self


class BatchConfig(Section):
    """Sizes in samples. Micro-batches are the unit that is dealt to workers."""

    global_batch_size: int = Field(32, ge=1, le=BATCH_MAX)
    micro_batch_size: int = Field(4, ge=1, le=BATCH_MAX)

    @property
    def micro_batches(self) -> int:
        return self.global_batch_size // self.micro_batch_size

    @model_validator(mode="after")
    def divisible(self) -> BatchConfig:
        if self.global_batch_size % self.micro_batch_size:
            raise ValueError(
                f"global_batch_size {self.global_batch_size} is not a multiple of "
                f"micro_batch_size {self.micro_batch_size}"
            )
        return self


class PrecisionConfig(Section):
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"  # of compute; parameters stay fp32
    tf32: bool = True  # on GPUs: fp32 matrix products by tensor cores, inputs cut to 10 bits
    initial_loss_scale: float = Field(2.0**16, gt=0)  # fp16
    loss_scale_growth_steps: Count = 2000


class DeviceConfig(Section):
    """What strategy ``auto`` is planned by: what a device really reaches, not the datasheet."""

    memory_gb: float | None = Field(None, gt=0)  # 10^9 bytes; none: as the workers find
    tflops: float = Field(400, gt=0)
    intra_gb_per_s: float = Field(300, gt=0)  # of a device, one way, within its node
    inter_gb_per_s: float = Field(40, gt=0)  # to other nodes


class ParallelConfig(Section):
    """``tp`` and ``pp`` are kept whole unless ``elastic.multiple_of`` says otherwise."""

    # Of data ranks; auto: of everything.
    strategy: Literal[Strategy, "auto"] = LayoutWish.strategy
    devices: DeviceConfig = DeviceConfig()
    # Of hsdp: ranks that share one replica.
    shard_size: int | None = Field(LayoutWish.shard_size, ge=2)
    # Ranks that share each layer, sequence-parallel between layers.
    tp: int = Field(LayoutWish.tp, ge=1)
    tp_plan: str | None = None  # "package.module:name", how tp cuts a model of your own
    pp: int = Field(LayoutWish.pp, ge=1)  # ranks that share the layers out as pipeline stages
    schedule: Literal["gpipe", "1f1b", "interleaved1f1b", "zero_bubble"] = "1f1b"
    engine: Literal["native", "deepspeed"] = "native"
    zero_stage: int | None = Field(None, ge=0, le=3)  # deepspeed: what the whole world shards
    offload_optimizer: bool = False  # deepspeed: optimizer state and step on the CPU
    activation_checkpointing: bool = False
    # Native, without tp and pp: parameters that a rank's samples do not use have gradients of zero.
    unused_parameters: bool = False
    # fsdp, hsdp without pp: free gathered weights after each backward; false: after a step's last
    # one, which takes the memory of the whole weights, and gathers them once a step.
    reshard_after_backward: bool = True
    # fsdp, hsdp without pp: over the ranks of a replica, after each micro-batch, or once a step,
    # which takes the memory of the whole gradients. Over replicas, once a step anyway.
    reduce_gradients: Literal["micro_batch", "step"] = "micro_batch"
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: a GPU if there is one, not with gloo
    backend: Literal["auto", "gloo", "nccl"] = "auto"  # gloo on cuda: through host memory, slow

    @field_validator("offload_optimizer", mode="before")
    @classmethod
    def not_to_nvme(cls, value: Any) -> Any:
        if value == "nvme":
            raise ValueError("offload to NVMe is not offered, as it can train wrong without a word")
        return value

    @model_validator(mode="after")
    def nccl_is_for_gpus(self) -> ParallelConfig:
        if self.backend == "nccl" and self.device == "cpu":
            raise ValueError("backend nccl is for GPUs, and device is cpu")
        return self

    @property
    def wants_gpu(self) -> bool:
        """Without one a worker can't take part."""
        return self.device == "cuda" or self.backend == "nccl"

    @property
    def may_use_gpu(self) -> bool:
        return self.wants_gpu or (self.device == "auto" and self.backend == "auto")

    @model_validator(mode="after")
    def auto_decides(self) -> ParallelConfig:
        given = [k for k in ("shard_size", *MODEL_DIMENSIONS) if k in self.model_fields_set]
        given = [k for k in given if getattr(self, k) not in (None, 1)]
        if self.strategy == "auto" and given:
            raise ValueError(f"strategy auto decides on {given[0]}: leave it out")
        return self

    @model_validator(mode="after")
    def accumulates_shards(self) -> ParallelConfig:
        given = {
            "reshard_after_backward": not self.reshard_after_backward,
            "reduce_gradients": self.reduce_gradients != "micro_batch",
        }
        sharded = self.strategy != "ddp" and self.engine == "native" and self.pp == 1
        for key in (key for key, is_given in given.items() if is_given and not sharded):
            raise ValueError(f"{key}: is of strategy fsdp, hsdp and auto, without pp; leave it out")
        return self

    @model_validator(mode="after")
    def knows_what_is_unused(self) -> ParallelConfig:
        whole = self.engine == "native" and self.strategy != "auto" and self.tp == self.pp == 1
        if self.unused_parameters and not whole:
            raise ValueError("unused_parameters: is of ddp, fsdp and hsdp without tp and pp")
        return self

    @property
    def cuts_layers(self) -> bool:
        """Whether ranks share each layer."""
        return self.tp > 1

    @property
    def wish(self) -> LayoutWish:
        """What layouts are made of by rule."""
        return LayoutWish(**same_names(LayoutWish, self) | {"strategy": self.data_strategy})

    @property
    def data_strategy(self) -> Strategy:
        """How the data-parallel ranks hold the state. ZeRO shards the optimizer's from stage 1.

        Of ``auto``: what the planner has no say in.
        """
        if self.engine == "native":
            return "fsdp" if self.strategy == "auto" else self.strategy
        return "fsdp" if self.zero_stage else "ddp"


class ElasticConfig(Section):
    """Who may take part, and how long to wait for what. What the core decides by has its defaults
    in ``core.policy.Policy``."""

    min_workers: Workers = 1
    max_workers: Workers = 1
    workers_per_node: Workers = 1
    # Worlds are multiples of this, the rest stays warm; none: of parallel.tp x pp, which are
    # then never lowered. Given, they are, in worlds that they do not divide.
    multiple_of: Workers | None = None
    # Kept warm beside max_workers, to take a lost one's place.
    spares: int = Field(Policy.spares, ge=0, le=WORKERS_MAX)
    # Until min_workers are ready; on Ray, also from each worker's place to its process.
    start_timeout_s: Seconds = Policy.start_timeout_s
    gather_s: Delay = Policy.gather_s  # at the start: wait so long for more than min_workers
    join_batch_s: Delay = Policy.join_batch_s  # joiners that come together join together
    suspend_timeout_s: Seconds = Policy.suspend_timeout_s  # below min_workers
    # Survivors to reach a safe point once aborted.
    pause_timeout_s: Seconds = Policy.pause_timeout_s
    # Forming plus re-sharding, without a byte of state.
    form_timeout_s: Seconds = Policy.form_timeout_s
    # No progress inside a step; three times as long as a step takes, if that is longer.
    hang_timeout_s: Seconds = 60
    heartbeat_timeout_s: Seconds = 10  # nothing at all from a worker
    # In a row, broken with every member alive; and as many with a loss on one and the same node.
    max_generations_without_progress: Count = Policy.max_generations_without_progress
    # Retries, until a step goes by without an exception.
    max_user_failures: CountFrom0 = Policy.max_user_failures
    # Unfit workers, before it is avoided for a while.
    max_node_failures: Count = Policy.max_node_failures
    # A joiner must be worth its pause within that.
    regrow_repaid_s: Seconds = Policy.regrow_repaid_s
    regrow_delay_max_s: Delay = Policy.regrow_delay_max_s  # and waits at most so long if it is not
    evict_stragglers: bool = Policy.evict_stragglers
    # Slower by this than the median of all members, for so many steps.
    straggler_factor: float = Field(Policy.straggler_factor, gt=1)
    straggler_window_steps: int = Field(Policy.straggler_window_steps, ge=2, le=100_000)

    @property
    def workers_wanted(self) -> int:
        """At most: the world's and the spares."""
        return self.max_workers + self.spares

    @model_validator(mode="after")
    def ordered(self) -> ElasticConfig:
        if self.min_workers > self.max_workers:
            raise ValueError(
                f"min_workers {self.min_workers} is greater than max_workers {self.max_workers}"
            )
        return self

    @model_validator(mode="after")
    def some_world(self) -> ElasticConfig:
        each = self.multiple_of or 1
        if self.max_workers // each * each < self.min_workers:
            raise ValueError(
                f"no multiple of {each} is between min_workers {self.min_workers} and "
                f"max_workers {self.max_workers}"
            )
        return self


class SnapshotConfig(Section):
    """Of sharded layouts, to host memory and to buddies."""

    every_steps: Count | Literal["auto"] = "auto"  # auto: by measured cost
    max_cost: float = Field(0.01, gt=0, lt=1)  # auto: share of the step time
    max_steps: Count = 50  # auto: at most; what a failure may make redo
    copies: int = Field(Policy.copies, ge=1, le=8)  # of each shard, on as many nodes
    domain_label: str | None = None  # Ray node label of what fails together: a rack, a zone


class CheckpointConfig(Section):
    url: str | None = None  # any fsspec URL; none: checkpoints/ in the run folder
    every_steps: CountFrom0 = 0  # 0: not by steps
    every_s: Seconds | Literal["auto"] | None = "auto"  # auto: Young/Daly
    final: bool = True
    keep_last: Count = Policy.keep_last
    # Each is read back once, by the controller and a few objects at a time, before an older one is
    # deleted for it. Without, their lengths are all that is known of shards before someone reads.
    read_back: bool = True
    keep_for_h: float | None = Field(None, gt=0)  # and whatever is younger than that
    # Begin anew from the seed where no checkpoint is good, although steps are recorded. It is said
    # for one start: the run folder's job.yaml leaves it out.
    from_scratch: bool = Policy.from_scratch
    max_upload_mb_per_s: float | None = Field(None, gt=0)  # per worker, in 10^6 bytes; none: no cap


class NetworkConfig(Section):
    """Where the job's own processes listen. The ports of Gloo and NCCL are the kernel's choice."""

    ports: str | None = Field(None, pattern=r"^[0-9]{1,5}-[0-9]{1,5}$")  # "20000-20099"; none: any
    metrics_address: str = "127.0.0.1"  # of the controller's machine; 0.0.0.0: all it has
    tls: bool = False  # around our own connections, under a certificate made for this start

    @model_validator(mode="after")
    def some_ports(self) -> NetworkConfig:
        found = self.port_range
        if found is not None and not (found and found[0] >= 1024 and found[-1] <= 65535):
            raise ValueError(f"ports {self.ports!r} are not between 1024 and 65535, in this order")
        return self

    @property
    def port_range(self) -> range | None:
        """Every socket that we listen at has one of these ports, if there are any."""
        if self.ports is None:
            return None
        first, last = map(int, self.ports.split("-"))
        return range(first, last + 1)


class FaultConfig(Section):
    """Faults to inject: off by default. See chaos/ for scenarios."""

    scenario: str | None = None  # file of a scenario


class Job(Section):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    seed: int = Field(0, ge=0, le=SEED_MAX)
    steps: Count
    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    batch: BatchConfig = BatchConfig()
    precision: PrecisionConfig = PrecisionConfig()
    parallel: ParallelConfig = ParallelConfig()
    elastic: ElasticConfig = ElasticConfig()
    snapshot: SnapshotConfig = SnapshotConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    network: NetworkConfig = NetworkConfig()
    faults: FaultConfig = FaultConfig()
    audit: bool = False  # write ledger.jsonl: the samples each committed step consumed

    @property
    def multiple_of(self) -> int:
        """Worlds are multiples of this."""
        return self.elastic.multiple_of or self.parallel.wish.ranks_per_sample

    def imports(self) -> list[str]:
        """The code of the user's that the job names, as key and "module:name"."""
        named = {
            "model.path": self.model.path,
            "data.path": self.data.path,
            "optimizer.name": self.optimizer.name,
            "optimizer.schedule": self.optimizer.schedule,
            "parallel.tp_plan": self.parallel.tp_plan,
        }
        return [f"{key} {path}" for key, path in named.items() if path and ":" in path]

    @model_validator(mode="after")
    def stages_take_tokens_alone(self) -> Job:
        if self.data.separate_documents and self.parallel.pp > 1:
            raise ValueError("data.separate_documents: not with parallel.pp")
        return self

    @model_validator(mode="after")
    def every_worker_has_work(self) -> Job:
        if self.batch.micro_batches < self.elastic.max_workers:
            raise ValueError(
                f"batch.global_batch_size {self.batch.global_batch_size} makes "
                f"{self.batch.micro_batches} micro-batches, fewer than elastic.max_workers "
                f"{self.elastic.max_workers}: some workers would have nothing to do"
            )
        return self


def parse_job(values: Any, where: str = "job") -> Job:
    """Returns the typed job. Raises ConfigError with one line: the first bad key and why.

    ``where``: what the values are from; a file's name is part of the line.
    """
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: expected a mapping of sections, found {type(values).__name__}")
    if _count(values) > VALUES_MAX:
        raise ConfigError(f"{where}: more than {VALUES_MAX} values, which no job has")
    try:
        return Job.model_validate(values)
    except ValidationError as error:
        first, *others = error.errors(include_url=False)
        key = ".".join(_line(part) for part in first["loc"]) or where
        message = {"extra_forbidden": "unknown key", "missing": "required key is missing"}.get(
            first["type"], _line(first["msg"].removeprefix("Value error, "), 300)
        )
        if first["type"] == "extra_forbidden":
            message += _did_you_mean(first["loc"])
        found = ""
        if first["type"] not in ("extra_forbidden", "missing", "value_error"):
            found = f", found {_line(_shown(first['input']))}"
        more = f" (and {len(others)} more)" if others else ""
        inside = f" (in {where})" if where not in ("job", key) else ""
        raise ConfigError(f"{key}: {message}{found}{more}{inside}") from None
    except (RecursionError, OverflowError, TypeError) as error:  # of a value that refers to itself
        raise ConfigError(f"{where}: not a job: {_line(error)}") from None


def _count(values: Any) -> int:
    """How many values there are, aliases counted wherever they are used: one more than VALUES_MAX
    if there are more, or if they go round in a circle."""
    count, left = 0, [values]
    while left and count <= VALUES_MAX:
        count += 1
        one = left.pop()
        if isinstance(one, dict):
            left.extend(one.values())
        elif isinstance(one, list | tuple | set):
            left.extend(one)
    return count


def _shown(value: Any) -> str:
    if isinstance(value, int) and abs(value) > COUNT_MAX**2:
        return "a number of very many digits"
    return reprlib.repr(value)


def _line(value: object, length: int = SHOWN) -> str:
    """One line that any terminal takes."""
    text = " ".join(str(value).split())
    text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= length else f"{text[: length - 3]}..."


def _did_you_mean(path: tuple[int | str, ...]) -> str:
    """The known key nearest to the last of ``path``, if one is near; and where it is known."""
    section: Any = Job
    for part in path[:-1]:
        found = section.model_fields.get(part)
        if found is None:
            return ""
        section = found.annotation
        if not hasattr(section, "model_fields"):
            return ""
    near = difflib.get_close_matches(str(path[-1])[:SHOWN], section.model_fields, 1)
    return f", did you mean {near[0]}?" if near else ""


class _Loader(yaml.SafeLoader):
    """Merge keys ("<<") copy what they merge: bounded, or a few lines of them would fill memory."""

    def flatten_mapping(self, node: Any) -> None:
        for _, value in node.value:
            if isinstance(value, yaml.SequenceNode) and len(value.value) > MERGED_MAX:
                self._refuse(node) if any(k.value == "<<" for k, _ in node.value) else None
        super().flatten_mapping(node)
        if len(node.value) > MERGED_MAX * 10:
            self._refuse(node)

    def _refuse(self, node: Any) -> None:
        raise yaml.constructor.ConstructorError(None, None, "too many keys", node.start_mark)


def load_job(path: str | Path) -> Job:
    """Returns the job in a YAML file. Raises ConfigError."""
    try:
        with Path(path).open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    return parse_text(content, str(path))


def parse_text(content: bytes, where: str) -> Job:
    """As ``parse_job``, of a job file's content."""
    return parse_job(parse_yaml(content, where), where)


def parse_yaml(content: bytes, where: str) -> Any:
    """The values in a YAML file. Raises ConfigError, one line that begins with ``where``."""
    if len(content) > FILE_BYTES_MAX:
        raise ConfigError(f"{where}: larger than {FILE_BYTES_MAX} bytes, which no job file is")
    try:
        return yaml.load(content.decode(), _Loader)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: not a text file: {error.reason}") from None
    except (yaml.YAMLError, *ESCAPES) as error:
        raise ConfigError(f"{where}: not YAML: {_line(error, 300)}") from None
