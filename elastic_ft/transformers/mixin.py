"""``ElasticMixin``: Hugging Face's ``Trainer``, and those of TRL, in a world that changes.

The trainer's own methods make the loss, the logs, the evaluation and the exports. Its loop over an
epoch is this one: batches come from the context, a step is a function that can be made again, and
what the trainer keeps is registered.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import TrainingArguments

from elastic_ft.config.section import COUNT_MAX
from elastic_ft.errors import ConfigError, UsageError
from elastic_ft.models.named import fetched
from elastic_ft.training import context as training
from elastic_ft.training.batch import Batch
from elastic_ft.training.context import Context, current
from elastic_ft.transformers import arguments as known
from elastic_ft.transformers.accelerator import ElasticAccelerator, make_elastic
from elastic_ft.transformers.evaluation import DealtBatches, Watched
from elastic_ft.transformers.kept import Kept, Values, by_micro_batch, from_all, packed
from elastic_ft.transformers.memory import Generators, History, TrainerMemory
from elastic_ft.transformers.samples import Samples, collated_alike, draws_kept, epoch_order, sent
from elastic_ft.worker.prepare import PageLocked

HOST = torch.device("cpu")


class ElasticMixin:
    """Before a trainer's class: ``class Elastic(ElasticMixin, SFTTrainer): ...``.

    Args:
        global_batch_size: samples of a step, whatever the world; by default
            per_device_train_batch_size times gradient_accumulation_steps.
    """

    def __init__(self, *args: Any, global_batch_size: int | None = None, **kwargs: Any) -> None:
        arguments = _arguments(args, kwargs)
        known.check_arguments(arguments)
        known.check_model(args[0] if args else kwargs.get("model"))
        total, micro = known.sizes(arguments, global_batch_size)
        self.context = _context(total, micro)
        known.check_best(arguments, self.context.job.parallel.strategy)
        arguments.gradient_accumulation_steps = total // micro
        known.on_device(arguments, self.context.device)
        self._batches: Iterator[Batch] | None = None
        self._joined: Any = None  # (model, loader), once ``train`` has joined the world
        self._restored: dict[str, Any] | None = None
        self._found: str | bool | None = None  # a checkpoint, by the script
        self._whole: dict[str, torch.Tensor] | None = None  # weights that are being exported
        self._dealt, self._kept = total, Kept(self)
        self._lock = PageLocked(self.context.device)
        super().__init__(*args, **kwargs)
        known.check_model(self.model)  # TRL's trainers load it by its name

    # ------------------------------------------------------------------------- the world

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        self.accelerator: ElasticAccelerator = make_elastic(self.accelerator, self.context)
        self.gather_function = self.accelerator.gather_for_metrics

    def _new_world(self, context: Context) -> None:
        known.ranked(self.args, context.rank)
        self.state.is_world_process_zero = self.state.is_local_process_zero = context.rank == 0

    # ------------------------------------------------------------------------ the beginning

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """As the trainer's. A checkpoint that a script has found is not read: the job goes on from
        its own. Raises ConfigError if it has none, and would begin anew."""
        self._found = resume_from_checkpoint or None
        return super().train(None, *args, **kwargs)  # type: ignore[misc]

    def set_initial_training_values(self, args: TrainingArguments, dataloader: Any) -> Any:
        """As the trainer's; a step that lies in two epochs is one step."""
        found = list(super().set_initial_training_values(args, dataloader))  # type: ignore[misc]
        size = len(dataloader.dataset)
        if args.max_steps <= 0:
            found[6] = math.ceil(args.num_train_epochs * size / self._dealt)
        found[0] = math.ceil(found[6] * self._dealt / size)
        return tuple(found)

    def _init_training_state(self, max_steps: int, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Joins the world, so that what the trainer counts from here on is the job's."""
        super()._init_training_state(max_steps, *args, **kwargs)  # type: ignore[misc]
        if self._joined is not None:
            raise UsageError("Trainer.train: was called before in this process, which it ends")
        steps = self.context.job.steps
        if steps not in (max_steps, COUNT_MAX):
            raise ConfigError(f"steps: the job has {steps}, TrainingArguments {max_steps}")
        loader = self.get_train_dataloader()
        self._joined = super()._prepare_for_training(max_steps, loader, None)  # type: ignore[misc]
        self._tr_loss = torch.tensor(0.0)  # on the host: each step carries it
        self._total_loss_scalar, self._globalstep_last_logged = 0.0, 0
        draws_on = self.context.job.elastic.max_workers == 1
        given = self.context.loader(
            loader.dataset, Samples, epoch_order(loader, self.args.train_sampling_strategy)
        )
        prepared = self.context.prepare(
            self.model,
            self.optimizer.optimizer,
            self.lr_scheduler,
            given,
            seed=None if draws_on else self.args.seed,
            by_reference=True,
        )
        self._collate = loader.collate_fn
        self._memory = TrainerMemory(self)
        self.context.register(trainer=self._memory, history=History(self))
        if draws_on:
            self.context.register(generators=Generators())
        self._seed = None if draws_on else self.args.seed
        self.context.on_generation(self._new_world)
        self._step = self.context.step(self._one_step)
        self._batches = iter(prepared[3])
        self._next = next(self._batches, None)
        if self._found is not None and self._next is not None and self._next.number == 1:
            raise ConfigError(
                f"Trainer.train: resume_from_checkpoint: {self._found}: this job has made no step, "
                "and goes on from its own checkpoints alone: give another output_dir (and load the "
                "weights into the model, if they are meant), or the name of the run that wrote it"
            )
        self._restored = self._memory.state_dict()
        return self.state.global_step * self._dealt // len(loader.dataset), 0

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        return self._joined

    def _evaluate(self, trial: Any, ignore: Any, skip_scheduler: bool = False) -> dict[str, float]:
        """At the start, who joins later does not: the others would not do it with it."""
        if skip_scheduler and self.state.global_step:
            return {}
        found: dict[str, float] = super()._evaluate(trial, ignore, skip_scheduler)  # type: ignore[misc]
        return found

    # --------------------------------------------------------------------------- an epoch

    def _run_epoch(
        self,
        model: Any,
        epoch: int,
        train_dataloader: Any,
        steps_in_epoch: int,
        num_update_steps_per_epoch: int,
        trial: Any,
        ignore_keys_for_eval: Any,
        start_time: float,
        **_: Any,
    ) -> None:
        if self._restored is not None:  # the trainer has begun to count anew since
            self._memory.load_state_dict(self._restored)
            self._initial_global_step = self._initial_num_input_tokens_seen = 0
            self._restored = None
        size = len(train_dataloader.dataset)
        if self._seed is None:
            torch.empty((), dtype=torch.int64).random_()  # as a DataLoader's iterator does
        rest = (trial, epoch, ignore_keys_for_eval, start_time)
        done: dict[str, Any] = {"grad_norm": None, "learning_rate": None}
        while (batch := self._take()) is not None:
            self.control = self.callback_handler.on_step_begin(self.args, self.state, self.control)
            done = self._step(batch)
            self._settle(done, size)
            self.control = self.callback_handler.on_step_end(self.args, self.state, self.control)
            self._log_save_evaluate(model, done, *rest)
            if self.control.should_epoch_stop or self.control.should_training_stop:
                break
            if self.state.global_step * self._dealt >= (epoch + 1) * size:
                break
        self.control = self.callback_handler.on_epoch_end(self.args, self.state, self.control)
        self._log_save_evaluate(model, done, *rest)

    def _take(self) -> Batch | None:
        """The batch of the next step; None: the job has ended."""
        assert self._batches is not None
        found, self._next = self._next or next(self._batches, None), None
        if found is None:
            self.control.should_training_stop = True
        return found

    def _log_save_evaluate(
        self, model: Any, done: dict[str, Any], trial: Any, epoch: int, ignore: Any, start: float
    ) -> None:
        self._maybe_log_save_evaluate(
            self._tr_loss,
            done["grad_norm"],
            model,
            trial,
            epoch,
            ignore,
            start,
            learning_rate=done["learning_rate"],
        )

    # ---------------------------------------------------------------------------- a step

    def _one_step(self, batch: Batch) -> dict[str, Any]:
        """May be made again: what it returns is taken over once."""
        args, accelerator = self.args, self.accelerator
        micros, total, counted = self._counted(batch)
        losses: dict[int, torch.Tensor] = {}
        kept: dict[int, Values] = {}
        self.current_gradient_accumulation_steps = self._dealt // args.per_device_train_batch_size
        numbers = [given.number for given in batch.dealt.running.micro_batches]
        for index, _ in enumerate(batch):
            inputs, own = micros[index]
            inputs = sent(inputs, args.device, self._lock)
            is_last = index == len(micros) - 1
            accelerator.gradient_state._set_sync_gradients(is_last)
            accelerator.count = own if batch.weight else 0
            before = self._kept.begin()
            found = self.training_step(self.model_wrapped, inputs, total)
            gained = self._kept.take(before)
            if batch.weight:
                losses[numbers[index]], kept[numbers[index]] = found, gained
            if not is_last:
                self.control = self.callback_handler.on_substep_end(args, self.state, self.control)
        shared = self._shared(losses, kept)
        grad_norm = self._clip_grad_norm(self.model) if args.max_grad_norm > 0 else None
        grad_norm = self._get_grad_norm(self.model, grad_norm=grad_norm)
        self.control = self.callback_handler.on_pre_optimizer_step(args, self.state, self.control)
        self.optimizer.step()
        self.control = self.callback_handler.on_optimizer_step(args, self.state, self.control)
        learning_rate = self._get_learning_rate()
        self.lr_scheduler.step()
        self.model.zero_grad()
        return shared | counted | {"grad_norm": grad_norm, "learning_rate": learning_rate}

    def _counted(self, batch: Batch) -> tuple[list[Any], Any, dict[str, float]]:
        """This rank's micro-batches with their terms, those of all, and other counts of all."""
        args, size = self.args, self._dealt // self.args.per_device_train_batch_size
        given = batch.dealt.running.micro_batches
        micros = [collated_alike(m, self._collate, self._seed, batch.number) for m in given]
        weights = [m.weight for m in given]
        real = [inputs for inputs, weight in zip(micros, weights, strict=True) if weight]
        own = self._get_num_items_in_batch(real, HOST)
        flos = sum(float(self.floating_point_ops(inputs)) for inputs in real)
        before = self.state.num_input_tokens_seen
        for inputs in real:
            self._track_num_input_tokens(inputs)
        tokens, self.state.num_input_tokens_seen = self.state.num_input_tokens_seen - before, before
        items = 0.0 if own is None else float(own)
        items, flos, tokens = self.context.sum(items, flos, tokens)
        made = {} if own is None else {"dtype": own.dtype, "device": args.device}
        total = torch.full((), items, **made) if made else None  # a copy would wait for the device
        counts = [1 if own is None else int(self._items(inputs)) for inputs in micros]
        self.accelerator.of = size if own is None else max(1, int(items))
        counted = {"flos": flos, "input_tokens": int(tokens)}
        return list(zip(micros, counts, strict=True)), total, counted

    def _items(self, inputs: Any) -> Any:
        return self._get_num_items_in_batch([inputs], HOST)

    def _shared(self, losses: dict[int, torch.Tensor], kept: dict[int, Values]) -> dict[str, Any]:
        """All ranks' losses, and what TRL's trainers keep of micro-batches, in order."""
        count = self._dealt // self.args.per_device_train_batch_size
        table = [0.0] * count
        for number, value in zip(losses, fetched([*losses.values()]), strict=True):
            table[number] = value
        sizes = [0.0] * self.context.world_size  # of what ranks keep
        if any(kept.values()):
            sizes[self.context.rank] = len(packed(kept))
        summed = self.context.sum(*table, *sizes)
        everyones = from_all(kept, self.context, summed[count:])
        return {"losses": summed[:count], "kept": by_micro_batch(everyones)}

    def _settle(self, done: dict[str, Any], size: int) -> None:
        """The step is made: the trainer's counts go on, alike on all ranks."""
        for value in done["losses"]:
            if self.args.logging_nan_inf_filter and not math.isfinite(value):
                unlogged = 1 + self.state.global_step - self._globalstep_last_logged
                self._tr_loss += self._tr_loss / unlogged
            else:
                self._tr_loss += value
        self.current_flos += done["flos"]
        self.state.num_input_tokens_seen += done["input_tokens"]
        self._kept.add(done["kept"])
        self.state.global_step += 1
        epochs, place = divmod(self.state.global_step * self._dealt, size)
        self.state.epoch = epochs + place / size

    # -------------------------------------------------------------------- between two steps

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        super().log(logs, *args, **kwargs)  # type: ignore[misc]
        if self._joined is not None:
            plain = {k: v for k, v in logs.items() if isinstance(v, (bool, int, float, str))}
            self.context.log(plain)

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Dealt over ranks: each batch is seen by one, and its outcome by all."""
        loop = super().evaluation_loop  # type: ignore[misc]
        if self._joined is None:
            return loop(dataloader, *args, **kwargs)

        before = self._kept.copy("eval")

        def run(progress: Any) -> Any:
            self._kept.put_back("eval", before)  # what an attempt that broke has left
            with self._dealt_rounds(dataloader, progress) as loader:
                return loop(loader, *args, **kwargs)

        return self.context.together(run)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """The job's own checkpoint, of the next step, and an export of this one."""
        self.context.save()
        self._by_one(lambda: super(ElasticMixin, self)._save_checkpoint(model, trial))  # type: ignore[misc]
        self.store_flos()
        if self.state.best_global_step:
            folder = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.best_global_step}"
            self.state.best_model_checkpoint = str(folder)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """By one process, of weights that may be cut."""
        save = super().save_model  # type: ignore[misc]
        if _internal_call or self._joined is None:
            save(output_dir, _internal_call=_internal_call)
        else:
            self._by_one(lambda: save(output_dir))

    def _by_one(self, save: Callable[[], None]) -> None:
        """Rank 0 writes, and is waited for: where it is lost meanwhile, another does it anew."""

        def run(progress: Callable[[], None]) -> None:
            known.ranked(self.args, self.context.rank)  # of those who do this
            self._whole = self.context.whole_state(self.model) if self._is_cut else None
            if self.context.rank == 0:
                save()
            self._whole = None
            progress()
            self.context.sum(0.0)

        try:
            self.context.together(run)
        finally:
            known.ranked(self.args, self.context.rank)

    def _load_best_model(self) -> None:
        """As the trainer's, on all ranks: of one that finds what was exported, if not all do."""

        def run(progress: Callable[[], None]) -> None:
            context = self.context
            finds = [0.0] * context.world_size
            finds[context.rank] = float(Path(self.state.best_model_checkpoint).is_dir())
            finds = context.sum(*finds)
            if finds[context.rank] or not any(finds):  # nobody: the trainer says so
                super(ElasticMixin, self)._load_best_model()  # type: ignore[misc]
            progress()
            if any(finds) and not all(finds):
                taken_from(finds.index(1.0), self.model, context)

        self.context.together(run)

    @property
    def _is_cut(self) -> bool:
        return self.context.job.parallel.strategy != "ddp"

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, self._whole if state_dict is None else state_dict)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Not exported: the job's checkpoints have it."""

    def _save_scaler(self, output_dir: str) -> None:
        """Not exported."""

    def _save_rng_state(self, output_dir: str) -> None:
        """Not exported."""

    @contextlib.contextmanager
    def _dealt_rounds(self, dataloader: Any, progress: Any) -> Iterator[Any]:
        if self.context.world_size == 1:
            yield Watched(dataloader, progress)
            return
        if getattr(dataloader, "batch_sampler", None) is None:
            raise ConfigError("Trainer.evaluate: expected a map-style dataset, found a stream")
        self.accelerator.rounds = DealtBatches(dataloader, self.context, progress)
        try:
            yield self.accelerator.rounds
        finally:
            self.accelerator.rounds = None


class Trainer(ElasticMixin, transformers.Trainer):
    """``transformers.Trainer``; see ``ElasticMixin``."""


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> TrainingArguments:
    """Wherever a trainer, or a class between, takes them. Raises ConfigError."""
    found = [value for value in (*args, *kwargs.values()) if isinstance(value, TrainingArguments)]
    if not found:
        other = type(kwargs["args"]).__name__ if kwargs.get("args") is not None else "nothing"
        raise ConfigError(f"Trainer: args: expected TrainingArguments, found {other}")
    return found[0]


@torch.no_grad()
def taken_from(source: int, model: torch.nn.Module, context: Context) -> None:
    """Rank ``source``'s weights are everybody's: those that are trained, and buffers."""
    trained = (p for p in model.parameters() if p.requires_grad)
    for tensor in (*trained, *model.buffers()):
        tensor.copy_(context.all_gather(tensor.detach())[source])


def _context(total: int, micro: int) -> Context:
    """The script's own, or one of this batch. Raises ConfigError where the job has another."""
    batch = {"global_batch_size": total, "micro_batch_size": micro}
    context = current()
    if context is None:
        with draws_kept():  # the script, or the trainer, has seeded them
            return training.init(batch=batch)
    found = context.job.batch
    if (found.global_batch_size, found.micro_batch_size) != (total, micro):
        raise ConfigError(
            f"batch: the job has {found.global_batch_size} samples in micro-batches of "
            f"{found.micro_batch_size}, the trainer {total} in {micro}: "
            "global_batch_size and per_device_train_batch_size are to be the same"
        )
    return context
