"""How the model is laid out over ranks, and computed on each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, field_validator

from elastic_ft.config.section import SEQUENCE_MAX, Section, refused_for
from elastic_ft.core.layouts.layout import WISHES, ContextMethod, LayoutWish, Strategy
from elastic_ft.core.policy import same_names


class DeviceConfig(Section):
    """What strategy ``auto`` is planned by: what a device really reaches, not the datasheet."""

    memory_gb: float | None = Field(None, gt=0)  # 10^9 bytes; none: as the workers find
    tflops: float = Field(400, gt=0)  # that large matrix products reach
    intra_gb_per_s: float = Field(300, gt=0)  # of a device, one way, within its node
    inter_gb_per_s: float = Field(40, gt=0)  # to other nodes


class ParallelConfig(Section):
    """``tp`` and ``pp`` are kept whole unless ``elastic.multiple_of`` says otherwise."""

    # Of data ranks; auto: of everything.
    strategy: Literal[Strategy, "auto"] = LayoutWish.strategy
    devices: DeviceConfig = DeviceConfig()  # of strategy auto: what devices reach
    # Of hsdp: ranks that share one replica.
    shard_size: int | None = Field(LayoutWish.shard_size, ge=2)
    # Ranks that share each layer, sequence-parallel between layers.
    tp: int = Field(LayoutWish.tp, ge=1)
    tp_plan: str | None = None  # "package.module:name", how tp cuts a model of your own
    pp: int = Field(LayoutWish.pp, ge=1)  # ranks that share the layers out as pipeline stages
    cp: int = Field(LayoutWish.cp, ge=1)  # ranks that share the positions of each sample
    # In attention each gathers all keys and values, or has some heads of whole sequences (ulysses:
    # cp x tp divides the heads); auto: the latter where it can.
    cp_method: ContextMethod = LayoutWish.cp_method
    # Of a mixture of experts, fsdp and hsdp: data ranks that share each layer's experts out.
    ep: int = Field(LayoutWish.ep, ge=1)
    # Of pipeline stages.
    schedule: Literal["gpipe", "1f1b", "interleaved1f1b", "zero_bubble"] = "1f1b"
    engine: Literal["native", "deepspeed"] = "native"  # deepspeed: data parallel, by zero_stage
    zero_stage: int | None = Field(None, ge=0, le=3)  # deepspeed: what the whole world shards
    offload_optimizer: bool = False  # deepspeed: optimizer state and step on the CPU
    # Layers keep their inputs alone for backward; selective: what is dear to compute again, too.
    activation_checkpointing: bool | Literal["selective"] = False
    # Native, on GPUs: what layers keep for backward waits in host memory. Not with selective.
    offload_activations: bool = False
    # Of a preset: logits of so many tokens at a time in the loss, which then takes no more memory
    # for a longer sequence. None: of all.
    loss_chunk_tokens: int | None = Field(None, ge=1, le=SEQUENCE_MAX)
    # Of a preset, without pp and cp: each layer by torch.compile, before a worker takes part.
    compile: bool = False
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

    @refused_for
    def nccl_is_for_gpus(self) -> Iterator[str]:
        if self.backend == "nccl" and self.device == "cpu":
            yield "backend nccl is for GPUs, and device is cpu"

    @property
    def wants_gpu(self) -> bool:
        """Without one a worker can't take part."""
        return self.device == "cuda" or self.backend == "nccl"

    @property
    def may_use_gpu(self) -> bool:
        return self.wants_gpu or (self.device == "auto" and self.backend == "auto")

    @refused_for
    def auto_decides(self) -> Iterator[str]:
        given = [k for k in ("shard_size", *WISHES) if k in self.model_fields_set]
        given = [k for k in given if getattr(self, k) not in (None, 1)]
        if self.strategy == "auto" and given:
            yield f"strategy auto decides on {given[0]}: leave it out"

    @refused_for
    def shares_experts_alone(self) -> Iterator[str]:
        others = [key for key in ("tp", "pp") if getattr(self, key) > 1]
        others += ["unused_parameters"] * self.unused_parameters
        others += ["engine deepspeed"] * (self.engine != "native")
        if self.ep > 1 and others:
            yield f"ep: not with {others[0]}"
        if self.ep > 1 and self.strategy == "ddp":
            yield "ep: is of strategy fsdp and hsdp: with ddp no rank has less than all"

    @refused_for
    def accumulates_shards(self) -> Iterator[str]:
        given = {
            "reshard_after_backward": not self.reshard_after_backward,
            "reduce_gradients": self.reduce_gradients != "micro_batch",
        }
        sharded = self.strategy != "ddp" and self.engine == "native" and self.pp == 1
        for key in (key for key, is_given in given.items() if is_given and not sharded):
            yield f"{key}: is of strategy fsdp, hsdp and auto, without pp; leave it out"

    @refused_for
    def saves_activations(self) -> Iterator[str]:
        native = self.engine == "native"
        if self.offload_activations and (
            not native or self.activation_checkpointing == "selective" or self.device == "cpu"
        ):
            yield (
                "offload_activations: is of engine native on GPUs, with activation_checkpointing "
                "true or false"
            )
        if self.loss_chunk_tokens and not native:
            yield "loss_chunk_tokens: is of engine native"
        if self.pp > 1 and (key := self.is_differentiated_once):
            yield f"{key}: not with schedule zero_bubble, which differentiates twice"

    @refused_for
    def compiles_whole_layers(self) -> Iterator[str]:
        native = self.engine == "native" and self.strategy != "auto"
        others = self.pp > 1 or self.cp > 1 or self.tp_plan or self.offload_activations
        if self.compile and (others or not native):
            yield "compile: is of ddp, fsdp and hsdp without pp, cp, tp_plan or offload_activations"

    @refused_for
    def knows_what_is_unused(self) -> Iterator[str]:
        whole = (
            self.engine == "native" and self.strategy != "auto" and self.wish.ranks_per_sample == 1
        )
        if self.unused_parameters and not whole:
            yield "unused_parameters: is of ddp, fsdp and hsdp without tp, pp and cp"

    @property
    def is_differentiated_once(self) -> str | None:
        """What stages can't do by the schedule, if there are any."""
        if self.schedule != "zero_bubble":
            return None
        if self.activation_checkpointing == "selective":
            return "activation_checkpointing selective"
        return "loss_chunk_tokens" if self.loss_chunk_tokens else None

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
