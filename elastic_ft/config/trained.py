"""What is trained: model, data, optimizer, batches, precision; or a loop of one's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from elastic_ft.config.section import (
    BATCH_MAX,
    SEQUENCE_MAX,
    Count,
    CountFrom0,
    Section,
    refused_for,
)


class LoopConfig(Section):
    """The training loop is a script's own, which calls ``elastic_ft.init``: it has the model, the
    data and the optimizer, and says when it ends."""

    script: str | None = None  # a file on every node; none: a function does (ElasticTrainer)
    arguments: tuple[str, ...] = ()  # of the script
    # For what registered objects keep beside large tensors: numbers, text, small tensors.
    state_kb: int = Field(64, ge=1, le=1 << 20)
    # Whether all ranks make the same loss of the same micro-batch is looked at now and then.
    compare_losses: bool = True


class LoraSection(Section):
    """Adapters are trained instead of the model's weights, which are frozen. By peft."""

    rank: int = Field(8, ge=1, le=1 << 16)  # of the product that is added to a layer
    alpha: float = Field(16.0, gt=0, le=1e6)  # what they add is alpha / rank of their product
    # Linear layers by the ends of their names; none: what peft has for the architecture.
    targets: tuple[str, ...] | Literal["all-linear"] = ()
    dropout: float = Field(0.0, ge=0, lt=1)  # of what goes into the adapters


class ModelConfig(Section):
    """Exactly one of ``preset``, ``path``, ``transformers`` and ``pretrained``."""

    # A built-in decoder: decoder-1m, decoder-160m, decoder-moe-4m and others.
    preset: str | None = None
    path: str | None = None  # "package.module:callable" returning an nn.Module
    transformers: dict[str, Any] | None = None  # a Hugging Face config, with its model_type
    # A folder as Hugging Face has them, any fsspec URL: config.json and safetensors, to begin with.
    pretrained: str | None = None
    lora: LoraSection | None = None  # of pretrained: adapters alone are trained
    own: bool = False  # the loop's, see Job.loop
    # Of preset, in place of its own sizes; of path, what it is called with.
    kwargs: dict[str, Any] = Field(default_factory=dict)
    weights: str | None = None  # to begin with: a safetensors folder, any fsspec URL

    @refused_for
    def one_source(self) -> Iterator[str]:
        sources = ("preset", "path", "transformers", "pretrained")
        given = [key for key in sources if getattr(self, key) is not None]
        if len(given) + self.own != 1:
            found = " and ".join(given) if given else "none"
            yield f"expected one of {', '.join(sources)}; found {found}"
        if self.pretrained is not None and (self.weights or self.kwargs):
            yield "weights, kwargs: pretrained has its own; leave them out"
        if self.lora is not None and self.pretrained is None:
            yield "lora: needs pretrained: what is frozen is read from there"


class DataConfig(Section):
    """Token data from a URL, or a map-style dataset by import path."""

    url: str | None = None  # file, folder or glob, any fsspec URL; "stdlib:" = Python's own source
    # tokens are copied to cache_dir; token_shards, of any size, are read where they are.
    format: Literal["auto", "text", "jsonl", "parquet", "tokens", "token_shards"] = "auto"
    text_field: str = "text"  # of jsonl and parquet: where the text is
    tokenizer: str | None = None  # a tokenizer.json; none: a BPE is trained on the data
    # Ends each document: of the tokenizer, or an id; none: a usual name.
    end_token: str | Annotated[int, Field(ge=0, lt=1 << 32)] | None = None
    # Documents in one window do not attend to each other, and positions begin anew in each.
    separate_documents: bool = False
    # Of a trained BPE. Of token_shards, which nobody looks through: ids are below it.
    vocab_size: int = Field(4096, ge=258, le=1 << 31)
    token_bytes: Literal[2, 4] = 2  # of tokens and token_shards: little-endian unsigned
    sequence_length: int = Field(256, ge=2, le=SEQUENCE_MAX)  # tokens of a sample
    max_tokens: Count | None = None  # use at most this many
    eval_fraction: float = Field(0.02, ge=0, lt=1)  # held out, from the end
    eval_every_steps: CountFrom0 = 0  # evaluate what is held out so often; 0: never
    eval_samples: Count = 64  # at most so many of the held-out ones
    cache_dir: str = "~/.cache/elastic_ft"  # for tokenised data
    path: str | None = None  # "package.module:callable" returning a map-style dataset
    own: bool = False  # the loop's, see Job.loop
    kwargs: dict[str, Any] = Field(default_factory=dict)  # what path is called with

    @refused_for
    def one_source(self) -> Iterator[str]:
        if (self.url is not None) + (self.path is not None) + self.own != 1:
            yield "expected exactly one of url and path"
        if self.path is not None and ":" not in self.path:
            found = f"path: expected package.module:name, found {self.path!r}"
            yield f"{found}; a file is a url"

    @refused_for
    def shards_tell_their_vocabulary(self) -> Iterator[str]:
        if self.format == "token_shards":
            if "vocab_size" not in self.model_fields_set:
                yield "format token_shards needs vocab_size: that of the ids' tokenizer"
            if self.separate_documents:
                yield "separate_documents: format token_shards has no documents"

    @refused_for
    def knows_where_documents_end(self) -> Iterator[str]:
        if self.separate_documents and self.url is None:
            yield "separate_documents: is of url; a dataset has position_ids in samples"
        unknown = self.format == "tokens" and not (
            isinstance(self.end_token, int) or (self.end_token and self.tokenizer)
        )
        if self.separate_documents and unknown:
            yield "separate_documents: format tokens needs end_token: an id, say"


Beta = Annotated[float, Field(ge=0, lt=1)]
Rate = Annotated[float, Field(gt=0, le=1e6)]
Decay = Annotated[float, Field(ge=0, le=1e6)]
SCHEDULE_FREE = ("schedule_free_adamw", "schedule_free_sgd")
OFFLOADED = ("adamw", "adam", "sgd", *SCHEDULE_FREE)  # each number steps by itself
SCHEDULES = ("constant", "linear", "cosine", "wsd", "inverse_sqrt")


class ParameterGroup(Section):
    """Parameters by the pattern of their names in the whole model, ``*`` for any part.

    What is not given is as for all others.
    """

    match: str = Field(min_length=1)  # a pattern of names, * for any part
    lr: Rate | None = None  # its highest; the schedule shapes it as it does optimizer.lr
    weight_decay: Decay | None = None  # of vectors too
    muon: bool | None = None  # name muon: whether these are its, and not AdamW's


class OptimizerConfig(Section):
    # adamw, adam, sgd, muon, schedule_free_adamw, schedule_free_sgd, or "package.module:class"
    name: str = "adamw"
    lr: Rate = 3e-4  # its highest, which the schedule shapes
    weight_decay: Decay = 0.1  # of matrices; norms and biases have none
    groups: tuple[ParameterGroup, ...] = ()  # the first whose pattern matches counts
    betas: tuple[Beta, Beta] = (0.9, 0.95)  # of AdamW and Adam, schedule-free ones too
    eps: float = Field(1e-8, gt=0, le=1e6)  # of the same
    kwargs: dict[str, Any] = Field(default_factory=dict)  # what else its class takes
    # constant, linear, cosine, wsd, inverse_sqrt, or "package.module:callable", which is given
    # (step, steps) and returns what the rate is of lr: a function of these alone.
    schedule: str = "cosine"
    warmup_steps: CountFrom0 = 0  # a line from 0 to lr, before any schedule
    decay_steps: CountFrom0 = 0  # wsd: the last ones
    # What linear, cosine and wsd end at, and inverse_sqrt does not go below.
    min_lr_ratio: float = Field(0.1, ge=0, le=1)
    # Maximum global norm of a step's gradients; null: none.
    grad_clip: float | None = Field(1.0, gt=0)
    # Steps in a row whose gradients may be infinite or NaN: each is skipped. 0: none may.
    skip_nonfinite: int = Field(0, ge=0, le=10**6)
    # cpu: its state, and the weights that it steps, are in host memory, and so is its step.
    offload: Literal["cpu"] | None = None

    @field_validator("offload", mode="before")
    @classmethod
    def not_to_a_disk(cls, value: Any) -> Any:
        if value == "nvme":
            raise ValueError("nvme: not offered, a step would take a disk's time; cpu is")
        return value

    @property
    def is_schedule_free(self) -> bool:
        """It trains at other weights than those that it averages, which are what counts."""
        return self.name in SCHEDULE_FREE or self.name.startswith("schedulefree:")

    @field_validator("schedule")
    @classmethod
    def known(cls, value: str) -> str:
        if value not in SCHEDULES and ":" not in value:
            names = ", ".join(SCHEDULES)
            raise ValueError(f"expected one of {names} or package.module:callable, found {value!r}")
        return value

    @refused_for
    def groups_say_what_counts(self) -> Iterator[str]:
        if self.name != "muon" and any(group.muon is not None for group in self.groups):
            yield f"groups.muon: of name muon, found {self.name}"

    @refused_for
    def steps_where_its_state_is(self) -> Iterator[str]:
        if self.offload is not None and self.name not in OFFLOADED:
            yield f"offload: is of {', '.join(OFFLOADED)}, found {self.name}"

    @refused_for
    def averages_instead_of_decaying(self) -> Iterator[str]:
        if not self.is_schedule_free:
            return
        if self.schedule != "constant":
            yield (
                f"schedule: {self.name} takes constant, with or without warmup_steps, found "
                f"{self.schedule}"
            )
        if "warmup_steps" in self.kwargs:
            yield "kwargs.warmup_steps: optimizer.warmup_steps is the warm-up"
        for key in self.kwargs.keys() & {"betas", "momentum"}:
            yield from self._odd_average(self.kwargs[key], f"kwargs.{key}")
        if self.name == "schedule_free_adamw" and "betas" not in self.kwargs:
            yield from self._odd_average(self.betas, "betas")

    def _odd_average(self, given: Any, key: str) -> Iterator[str]:
        """x is made of y and z by a division by it."""
        among = isinstance(given, list | tuple)
        beta, which = (given[0], "the first") if among and given else (given, "it")
        if not (isinstance(beta, int | float) and 0 < beta < 1):
            yield (
                f"{key}: {self.name} averages with {which}: expected above 0 and below 1, "
                f"found {beta}"
            )

    @refused_for
    def decays_in_some_steps(self) -> Iterator[str]:
        if (self.schedule == "wsd") != (self.decay_steps > 0):
            yield "decay_steps: schedule wsd needs it, and no other schedule has it"


class BatchConfig(Section):
    """Sizes in samples. Micro-batches are the unit that is dealt to workers."""

    global_batch_size: int = Field(32, ge=1, le=BATCH_MAX)  # of a step, over all workers
    micro_batch_size: int = Field(4, ge=1, le=BATCH_MAX)  # that a worker computes at once

    @property
    def micro_batches(self) -> int:
        return self.global_batch_size // self.micro_batch_size

    @refused_for
    def divisible(self) -> Iterator[str]:
        if self.global_batch_size % self.micro_batch_size:
            yield (
                f"global_batch_size {self.global_batch_size} is not a multiple of "
                f"micro_batch_size {self.micro_batch_size}"
            )


class PrecisionConfig(Section):
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"  # of compute; parameters stay fp32
    # With bf16: products of linear layers by float8, scaled by tensor or by row. Needs torchao.
    fp8: Literal["tensorwise", "rowwise"] | None = None
    tf32: bool = True  # on GPUs: fp32 matrix products by tensor cores, inputs cut to 10 bits
    initial_loss_scale: float = Field(2.0**16, gt=0)  # of fp16
    loss_scale_growth_steps: Count = 2000  # of fp16: without an overflow, before it doubles
