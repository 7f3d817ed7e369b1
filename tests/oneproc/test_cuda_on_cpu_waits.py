"""For what of a GPU's a step waits: counted on the CPU, which is taken for one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from elastic_ft.data.prefetch import Prefetcher
from elastic_ft.engines import own_buffers
from elastic_ft.engines.balancing import Balancing
from elastic_ft.engines.base import MicroBatch
from elastic_ft.engines.own_buffers import Buffers
from elastic_ft.engines.own_frozen import Frozen
from elastic_ft.engines.pipeline import cut, tokens_and_targets
from elastic_ft.models import named as named_module
from elastic_ft.models.experts import MIXTURES, MixtureConfig, MixtureDecoder, MixtureOfExperts
from elastic_ft.models.mixture_stage import MixtureStage
from elastic_ft.models.named import NamedSums, fetched
from elastic_ft.transformers.samples import sent
from elastic_ft.worker import evaluating
from elastic_ft.worker.by_user import summed
from tests.oneproc.alone import attached, job_of, run_step
from tests.oneproc.own_loops import Own, Tied

# What has Python wait until a device has come to a number, and what brings one there from memory
# that can be swapped out.
WAITS = [(Tensor, n) for n in ("tolist", "item", "cpu", "numpy", "nonzero", "count_nonzero")]
WAITS += [(Tensor, n) for n in ("__float__", "__int__", "__bool__")]
WAITS += [(torch, "tensor"), (torch, "equal"), (torch, "as_tensor")]  # type: ignore[list-item]


@pytest.fixture(autouse=True)
def the_cpu_is_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named_module, "is_waited_for", lambda device: True)


def count(monkeypatch: pytest.MonkeyPatch, calls: list[str], *spied: tuple[Any, str]) -> None:
    for owner, name in spied:
        real = getattr(owner, name)

        def counted(*args: Any, real: Any = real, name: str = name, **kwargs: Any) -> Any:
            calls.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)


class Counted(nn.Module):
    """Counts its terms, and what it names, on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        positive = (x[:, 0] > 0).sum()
        return self.line(x).square().sum(), positive, {"share": (positive, len(x))}


@pytest.mark.parametrize(("strategy", "dtype"), [("ddp", "fp32"), ("fsdp", "bf16")])
def test_a_step_waits_for_the_device_once(
    monkeypatch: pytest.MonkeyPatch, strategy: str, dtype: str
) -> None:
    """It waited for the loss while the norm was not queued, for how many ranks have each gradient
    to be brought there, for the norm, for terms, and for metrics."""
    batches, waits = [torch.tensor([[1.0, 2.0], [-3.0, 5.0]])] * 4, list[str]()
    job = job_of(parallel={"strategy": strategy}, precision={"dtype": dtype})
    with attached(job, Counted) as engine:
        run_step(engine, 1, batches)
        count(monkeypatch, waits, *WAITS)
        _, terms, update = run_step(engine, 2, batches)
        monkeypatch.undo()
        assert terms == 4 and update.grad_norm > 0 and not update.skipped
    assert waits == ["tolist"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("is_mean", [False, True])
def test_a_step_of_ones_own_waits_for_the_device_once(
    monkeypatch: pytest.MonkeyPatch, strategy: str, is_mean: bool
) -> None:
    """For the norm, the loss, terms, metrics, the loss that ranks compare, and whether gradients
    that are cut had been touched, one after the other."""
    model, waits = Tied(), list[str]()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    own = Own(strategy, [model], [optimizer])

    def step(number: int) -> None:
        running = own.running(number, [torch.arange(6), torch.arange(6) + 3])
        running.is_compared, seen = True, None
        for micro in own.engine.micro_batches(running):
            if seen is not None:
                own.engine.check_gradients(seen)
            loss = F.cross_entropy(model(micro.data), micro.data.flip(0), reduction="sum")
            told = (loss / 6, None) if is_mean else (loss, torch.full((), 6))
            own.engine.backward(*told, {"mean": (loss.detach(), 6)})
            seen = own.engine.gradients_seen()
        own.engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        own.engine.end_attempt()
        assert len(running.compared) == 1 and own.engine.named.sums()[1] == 12

    with own.generation():
        step(1)
        count(monkeypatch, waits, *WAITS)
        step(2)
        monkeypatch.undo()
    assert waits == ["tolist"]


def test_frozen_weights_are_looked_at_with_a_steps_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    model, waits = nn.Linear(3, 3).requires_grad_(False), list[str]()
    frozen = Frozen(model.named_parameters, set(), keeps=False)
    count(monkeypatch, waits, *WAITS)
    found = [frozen.has_changed(step) for step in (1, 3)]
    model.weight.data[0, 0] += 1.0  # which torch does not count
    found.append(frozen.has_changed(5))
    assert waits == []
    monkeypatch.undo()
    assert [bool(one) for one in found] == [False, False, True]


def test_running_statistics_are_shared_with_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many micro-batches each had seen was asked four times in a step, and whether any other
    buffer had changed once for each."""
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2), nn.BatchNorm1d(2))
    for number in range(2):
        model.register_buffer(f"constant{number}", torch.ones(3))
    buffers, waits = Buffers([model], model.named_buffers), list[str]()
    monkeypatch.setattr(own_buffers, "is_waited_for", lambda device: True)
    monkeypatch.setattr("torch.distributed.all_reduce", lambda tensor: None)  # the other has none
    buffers.capture()
    count(monkeypatch, waits, *WAITS)
    for _ in range(2):
        buffers.begin()
        model(torch.randn(4, 2))
        buffers.share(0, 2, torch.device("cpu"), lambda: None)
        buffers.end()
    monkeypatch.undo()
    assert waits == ["tolist"] * 2
    assert [int(model[n].num_batches_tracked) for n in (0, 2)] == [2, 2]


def test_experts_are_balanced_with_one_copy_each_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mixture had a copy out and one in of its own, and the step waited for each."""
    config, mixtures = MIXTURES["decoder-moe-4m"], 3
    model = torch.nn.ModuleList(MixtureOfExperts(config) for _ in range(mixtures))
    balancing, copies = Balancing([model]), list[str]()
    balancing.begin()
    for mixture in list(model)[:2]:
        mixture.load = torch.arange(config.n_experts)
    count(monkeypatch, copies, (torch.Tensor, "tolist"), (torch, "tensor"))
    norm, *sums = fetched([torch.tensor(2.5), *balancing.queued()])
    assert norm == 2.5
    assert sums == [*range(config.n_experts)] * 2 + [0.0] * config.n_experts
    balancing.agreed(sums)
    balancing.apply()
    assert copies == ["tensor", "tolist", "tensor"]  # the first: of this test
    monkeypatch.undo()
    least_first = torch.linspace(1, -1, config.n_experts).sign() * config.bias_rate
    for mixture, expected in zip(model, (least_first, least_first, 0 * least_first), strict=True):
        torch.testing.assert_close(mixture.bias, expected)


def test_named_metrics_are_fetched_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sum and each count was fetched by a copy of its own, for which the step waited."""
    named, waits = NamedSums(), list[str]()
    named.begin()
    for number in (1.0, 2.0):
        pair = (torch.tensor(number), torch.tensor([2]))
        named.add({"a": pair, "b": (torch.tensor(0.5), 4), "c": (3.0, 1)})
    count(monkeypatch, waits, (torch.Tensor, "tolist"), (torch.Tensor, "__float__"))
    assert named.sums() == [3.0, 4.0, 1.0, 8.0, 6.0, 2.0]
    assert waits == ["tolist"]


def test_a_pipelines_micro_batches_wait_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage of experts asked of each whether it was padding: what that has is zeros anyway."""
    torch.manual_seed(0)
    model = MixtureDecoder(MixtureConfig(61, 2, 16, 2, 1, 32, 32, n_experts=4, expert_ffn_dim=8))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    (stage,) = cut(model, 0, 1, "1f1b").values()
    assert isinstance(stage, MixtureStage)
    data, balancing, found = {"tokens": torch.randint(61, (2, 9))}, Balancing([stage], model), []
    monkeypatch.setattr(Tensor, "__bool__", lambda tensor: pytest.fail("it is asked for"))
    for weight in (1.0, 0.0):
        balancing.begin()
        stage.router_sum = torch.zeros((), dtype=torch.float64)
        tokens, _, more = tokens_and_targets(
            MicroBatch(0, data, weight), torch.device("cpu"), stage
        )
        stage.length = tokens.shape[1]
        stage(tokens, **more)
        found.append((stage.router_sum, balancing.queued()))
    monkeypatch.undo()
    (some, sent_to), (none, padding) = found
    assert float(some.detach()) > 0 and sum(fetched(sent_to)) == 2 * 2 * 8 * 2
    assert float(none.detach()) == 0 and sum(fetched(padding)) == 0


def test_what_is_held_out_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each micro-batch's loss was waited for before the next one was queued."""
    waits = list[str]()
    batches = [MicroBatch(n, torch.tensor([[1.0, n], [-3.0, 5.0]])) for n in range(4)]

    def by_user(micro: MicroBatch) -> tuple[Tensor, Tensor]:
        return micro.data.sum(), torch.full((), 2)

    with attached(job_of(), Counted) as engine:
        count(monkeypatch, waits, *WAITS)
        loss, terms, _ = engine.evaluate(iter(batches))
        assert waits == ["tolist"] and loss > 0 and terms == 4
        assert summed(by_user, iter(batches))[:2] == (4 * 3.0 + 6, 8.0)
    assert waits == ["tolist"] * 2


class HeldOut:
    def __getitem__(self, index: int) -> int:
        return index

    def collate(self, samples: list[int]) -> list[int]:
        return samples


def test_what_is_held_out_is_page_locked_too() -> None:
    """Else the copy of each waits for what was queued before it."""
    locked: list[Any] = []
    prefetcher = Prefetcher(HeldOut(), finish=lambda data: locked.append(data) or data)
    batch = SimpleNamespace(micro_batch_size=2)
    loop: Any = SimpleNamespace(
        job=SimpleNamespace(batch=batch),
        party=SimpleNamespace(is_whole=False, world_size=1, rank=0),
        progress=lambda: None,
        tools=SimpleNamespace(prefetcher=prefetcher),
    )
    found = [micro.data for micro in evaluating._micro_batches(loop, HeldOut(), 3)]
    assert found == locked == [[0, 1], [2]]


def test_a_trainers_batch_is_sent_by_a_copy_that_does_not_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The trainer's own waits for the micro-batch before."""
    copies: list[dict[str, Any]] = []
    to = Tensor.to

    def spied(tensor: Tensor, *args: Any, **how: Any) -> Tensor:
        copies.append(how)
        return to(tensor, *args, **how)

    with FakeTensorMode():
        batch, locked = {"input_ids": torch.zeros(2, 3)}, list[Any]()
        assert sent(batch, torch.device("cpu"), locked.append) is batch and not locked
        monkeypatch.setattr(Tensor, "to", spied)
        found = sent(batch, torch.device("cuda", 0), lambda data: locked.append(data) or data)
        monkeypatch.undo()
    assert found["input_ids"].is_cuda and locked == [batch]
    assert [how["non_blocking"] for how in copies] == [True]
