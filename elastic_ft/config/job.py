"""The job: its sections, and what they can't be together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import Field, model_validator

from elastic_ft.config import trained
from elastic_ft.config.comm import CommConfig
from elastic_ft.config.elastic import (
    CheckpointConfig,
    ElasticConfig,
    FaultConfig,
    NetworkConfig,
    SnapshotConfig,
)
from elastic_ft.config.parallel import ParallelConfig
from elastic_ft.config.section import COUNT_MAX, NAME, SEED_MAX, Count, Section, refused_for
from elastic_ft.core.layouts.layout import OF_LAYERS, WISHES


class Job(Section):
    # Of the run folder, and of whom checkpoints belong to.
    name: str = Field(pattern=NAME, max_length=100)
    seed: int = Field(0, ge=0, le=SEED_MAX)  # of weights, data order and per-sample randomness
    steps: Count  # to train in all
    model: trained.ModelConfig
    data: trained.DataConfig
    optimizer: trained.OptimizerConfig = trained.OptimizerConfig()
    batch: trained.BatchConfig = trained.BatchConfig()
    precision: trained.PrecisionConfig = trained.PrecisionConfig()
    parallel: ParallelConfig = ParallelConfig()
    comm: CommConfig = CommConfig()
    elastic: ElasticConfig = ElasticConfig()
    snapshot: SnapshotConfig = SnapshotConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    network: NetworkConfig = NetworkConfig()
    faults: FaultConfig = FaultConfig()
    audit: bool = False  # write ledger.jsonl: the samples each committed step consumed
    loop: trained.LoopConfig | None = None  # a training loop of one's own

    @model_validator(mode="before")
    @classmethod
    def loop_decides(cls, values: Any) -> Any:
        """With a loop of one's own, model and data are its own; it may end when it likes."""
        if not isinstance(values, dict) or values.get("loop") is None:
            return values
        own = {"own": True}
        for key in (key for key in ("model", "data") if key in values):
            if not (isinstance(values[key], dict) and values[key].get("own")):
                raise ValueError(f"{key}: is the loop's own; leave it out")
        return {"steps": COUNT_MAX, "model": own, "data": own, **values}

    @property
    def multiple_of(self) -> int:
        """Worlds are multiples of this."""
        return self.elastic.multiple_of or self.parallel.wish.ranks_per_sample

    @property
    def unit(self) -> str:
        """Of what a step takes: "tokens" of texts, or "samples" of what is the user's own."""
        return "samples" if self.data.path is not None or self.data.own else "tokens"

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

    @refused_for
    def own_is_of_loops(self) -> Iterator[str]:
        if (self.model.own or self.data.own) != (self.loop is not None):
            yield "model.own, data.own: are of a job that has a loop; leave them out"
        if self.loop is not None and self.optimizer != trained.OptimizerConfig():
            yield "optimizer: is the loop's own; leave it out"
        parallel = self.parallel
        if self.loop is not None and (
            parallel.strategy == "auto" or parallel.engine != "native" or parallel.wish.shared
        ):
            none = ", ".join(WISHES)
            yield f"loop: has engine native, strategy ddp, fsdp or hsdp, no {none}"

    @refused_for
    def loops_do_the_rest(self) -> Iterator[str]:
        """What would have no effect is refused: a loop calls its module by itself."""
        parallel = self.parallel
        own = {
            "compile": "call torch.compile in your script",
            "activation_checkpointing": "use torch.utils.checkpoint in your module",
            "offload_activations": "use torch.autograd.graph.save_on_cpu in your step",
            "loss_chunk_tokens": "the loss is your step's",
        }
        for key, instead in own.items() if self.loop is not None else ():
            if getattr(parallel, key):
                yield f"parallel.{key}: has no effect on a loop: {instead}"
        lower = self.precision.dtype != "fp32"
        if self.loop is not None and lower and parallel.strategy == "ddp":
            yield (
                "precision.dtype: has no effect on a loop with ddp: use torch.autocast in your step"
            )

    @refused_for
    def words_are_the_models(self) -> Iterator[str]:
        """A tokenizer that is trained on the data makes ids that mean nothing to such a model."""
        text = self.data.format in ("auto", "text", "jsonl", "parquet")
        if self.model.pretrained and self.data.url and text and self.data.tokenizer is None:
            yield "data.tokenizer: required with model.pretrained: the tokenizer.json of that model"

    @refused_for
    def adapters_can_be_laid_out(self) -> Iterator[str]:
        parallel = self.parallel
        if self.model.lora is None:
            return
        if parallel.strategy == "auto":
            yield "model.lora: strategy auto counts all weights as trained; name one"
        if parallel.wish.shared:
            yield f"model.lora: has no {', '.join(WISHES)}; ddp, fsdp, hsdp"
        if parallel.engine != "native" or parallel.compile:
            what = "parallel.compile" if parallel.compile else f"engine {parallel.engine}"
            yield f"model.lora: not with {what}"

    @refused_for
    def matrices_are_known(self) -> Iterator[str]:
        if self.optimizer.name == "muon" and self.parallel.engine != "native":
            yield "optimizer.name: muon: DeepSpeed partitions rows of numbers, native can"

    @refused_for
    def optimizers_are_laid_out(self) -> Iterator[str]:
        optimizer, parallel = self.optimizer, self.parallel
        if optimizer.offload is not None and parallel.engine != "native":
            yield (
                f"optimizer.offload: is of engine native; {parallel.engine} has "
                "parallel.offload_optimizer"
            )
        if optimizer.offload is not None and self.comm.compress_replicas is not None:
            yield "optimizer.offload: not with comm.compress_replicas"
        if optimizer.is_schedule_free and parallel.engine != "native":
            yield f"optimizer.name: {optimizer.name} is of engine native"

    @refused_for
    def chunks_in_range(self) -> Iterator[str]:
        if self.parallel.loss_chunk_tokens and self.precision.dtype == "fp16":
            yield (
                "parallel.loss_chunk_tokens: not with precision.dtype fp16: its gradients are made "
                "before the loss is scaled"
            )

    @refused_for
    def bytes_can_be_saved(self) -> Iterator[str]:
        key, parallel = self.comm.compresses, self.parallel
        if key is None:
            return
        if self.loop is not None or parallel.engine != "native":
            what = "a loop" if self.loop is not None else f"engine {parallel.engine}"
            yield f"comm.{key}: not with {what}"
        if parallel.strategy == "auto" or parallel.wish.shared:
            none = ", ".join(WISHES)
            yield f"comm.{key}: is of strategy ddp, fsdp and hsdp, without {none}"
        if self.comm.compress_shards and parallel.strategy == "ddp":
            yield "comm.compress_shards: strategy ddp has no shards; compress_replicas"
        if self.comm.compress_replicas:
            if parallel.strategy == "fsdp":
                yield "comm.compress_replicas: strategy fsdp has none; compress_shards"
            if self.model.lora is not None or self.precision.dtype == "fp16":
                what = "model.lora" if self.model.lora is not None else "precision.dtype fp16"
                yield f"comm.compress_replicas: not with {what}"

    @refused_for
    def eight_bits_are_enough(self) -> Iterator[str]:
        parallel, key = self.parallel, "precision.fp8"
        if self.precision.fp8 is None:
            return
        if self.precision.dtype != "bf16":
            yield f"{key}: needs precision.dtype bf16, found {self.precision.dtype}"
        if self.loop is not None or parallel.engine != "native" or self.model.lora is not None:
            yield f"{key}: not with a loop, engine deepspeed or model.lora"
        none = [name for name in WISHES if name != OF_LAYERS]
        if parallel.strategy == "auto" or {*none} & {*parallel.wish.shared}:
            yield f"{key}: is of strategy ddp, fsdp and hsdp, without {', '.join(none)}"

    @refused_for
    def every_worker_has_work(self) -> Iterator[str]:
        if self.batch.micro_batches < self.elastic.max_workers:
            yield (
                f"batch.global_batch_size {self.batch.global_batch_size} makes "
                f"{self.batch.micro_batches} micro-batches, fewer than elastic.max_workers "
                f"{self.elastic.max_workers}: some workers would have nothing to do"
            )
