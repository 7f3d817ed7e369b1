"""Whatever optimizer it is: its state is what plain PyTorch's is, carried on by somebody else."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic_ft.cli.check_model import check_optimizer
from elastic_ft.config import OptimizerConfig, parse_job
from elastic_ft.engines import optimizer_state
from elastic_ft.engines.optimizer_state import OptimizerState, materialise
from elastic_ft.engines.optimizers import make_optimizer
from elastic_ft.engines.rehearsal import begins_with_zeros, rehearse
from elastic_ft.errors import ConfigError
from tests.oneproc.alone import attached, job_of, run_step

OWN = "tests.oneproc.own_optimizers"
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "adam": {"amsgrad": True},
    "sgd": {"momentum": 0.9, "dampening": 0.5, "nesterov": False},
    "muon": {},
    "schedule_free_adamw": {},
    "schedule_free_sgd": {"r": 0.5},
    "schedulefree:RAdamScheduleFree": {},
    "torch.optim:NAdam": {},
    "torch.optim:RAdam": {},
    "torch.optim:Adamax": {},
    "torch.optim:Adadelta": {},
    "torch.optim:ASGD": {},
    "torch.optim:Rprop": {},
    "torch.optim:RMSprop": {"centered": True, "momentum": 0.5},
    "torch.optim:Adagrad": {"initial_accumulator_value": 0.1},
    "torch.optim:Adafactor": {},
    "transformers:Adafactor": {"relative_step": False, "scale_parameter": False},
    f"{OWN}:Counting": {},
    f"{OWN}:Slowing": {},
}
SHAPES = {"matrix": (5, 4), "vector": (4,), "late": (3, 3), "never": (2,)}


def config_of(name: str, kwargs: Mapping[str, Any]) -> OptimizerConfig:
    schedule = "constant" if name.startswith("schedule") else "cosine"
    return OptimizerConfig(
        name=name, lr=0.05, weight_decay=0.1, kwargs=dict(kwargs), schedule=schedule
    )


def make(name: str, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    return make_optimizer(config_of(name, OPTIMIZERS.get(name, {})), dict(parameters))


def parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {n: nn.Parameter(torch.randn(s, generator=generator)) for n, s in SHAPES.items()}


def set_gradients(parameters: Mapping[str, nn.Parameter], step: int) -> None:
    """The first step is skipped, one parameter has gradients from the third on, one never."""
    generator = torch.Generator().manual_seed(step)
    for name, parameter in parameters.items():
        drawn = torch.randn(parameter.shape, generator=generator)
        absent = name == "never" or (name == "late" and step < 4)
        parameter.grad = None if absent else drawn


def set_rate(optimizer: torch.optim.Optimizer, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.05 / step


def kept(state: OptimizerState, parameters: Mapping[str, Any]) -> dict[str, Tensor]:
    named = {f"{name}.{key}": tensor for name in parameters for key, tensor in state.of(name)}
    return named | dict(state.of_groups())


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("moved_at", [1, 2, 3, 5])
def test_as_plain_pytorch_from_hand_to_hand(name: str, moved_at: int) -> None:
    """Bit by bit, whatever step somebody else goes on after."""
    plain = parameters()
    expected = make(name, plain)
    mine: dict[str, nn.Parameter] = parameters()
    scratch = {n: nn.Parameter(torch.full_like(p, float("nan"))) for n, p in mine.items()}
    state = OptimizerState(lambda given: make(name, given), scratch)
    with torch.no_grad():
        for key, parameter in scratch.items():
            parameter.copy_(mine[key])
    state.clear()
    state.restored()
    mine = scratch
    for step in range(1, 8):
        for given in (plain, mine):
            set_gradients(given, step)
        if step > 1:
            set_rate(expected, step)
            expected.step()
            set_rate(state.optimizer, step)
            with state.stepping():
                state.optimizer.step()
        for key, parameter in mine.items():
            assert torch.equal(parameter, plain[key]), (step, key)
        if step == moved_at:
            weights = {n: p.detach().clone() for n, p in mine.items()}
            found = {key: tensor.clone() for key, tensor in kept(state, mine).items()}
            mine = {n: nn.Parameter(torch.full_like(p, 7.0)) for n, p in mine.items()}
            state = OptimizerState(lambda given: make(name, given), mine)
            listed = kept(state, mine)
            assert {k: (t.dtype, t.shape) for k, t in listed.items()} == {
                k: (t.dtype, t.shape) for k, t in found.items()
            }
            with torch.no_grad():
                for key, parameter in mine.items():
                    parameter.copy_(weights[key])
                for key, tensor in listed.items():
                    tensor.copy_(found[key])
            state.restored()


class Looking(torch.optim.SGD):
    """Begins its step with the device of its first parameter, as many do; notes what it steps."""

    def __init__(self, *args: Any, fails_at: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stepped: list[int] = []
        self.fails_at = fails_at

    def step(self, closure: Any = None) -> Any:
        assert self.param_groups[0]["params"][0].device.type == "cpu"
        self.stepped.append(sum(len(group["params"]) for group in self.param_groups))
        if len(self.stepped) == self.fails_at:
            raise RuntimeError("out of memory")
        return super().step(closure)


def looking(**kwargs: Any) -> tuple[Looking, list[Any]]:
    """One with two groups, and what its groups are."""
    groups = [{"params": [nn.Parameter(torch.ones(2)) for _ in range(2)]} for _ in range(2)]
    made = Looking(groups, lr=0.1, momentum=0.9, **kwargs)
    return made, shown(made)


def shown(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [(id(g), g["lr"], [*map(id, g["params"])]) for g in optimizer.param_groups]


@pytest.mark.parametrize(("on_gpu", "stepped"), [(True, [1, 1, 1, 1]), (False, [4])])
def test_state_made_in_pieces_never_steps_an_empty_group(
    monkeypatch: pytest.MonkeyPatch, on_gpu: bool, stepped: list[int]
) -> None:
    """On a GPU one parameter after the other, elsewhere all at once."""
    monkeypatch.setattr(optimizer_state, "MATERIALISED_BYTES", 0)
    monkeypatch.setattr(optimizer_state, "on_gpu", lambda numbered: on_gpu)
    optimizer, before = looking()
    materialise(optimizer)
    assert optimizer.stepped == stepped
    assert shown(optimizer) == before
    assert len(optimizer.state) == 4


def test_a_step_that_fails_midway_leaves_the_groups_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_state, "MATERIALISED_BYTES", 0)
    monkeypatch.setattr(optimizer_state, "on_gpu", lambda numbered: True)
    optimizer, before = looking(fails_at=3)
    with pytest.raises(RuntimeError, match="out of memory"):
        materialise(optimizer)
    assert shown(optimizer) == before
    assert all(p.grad is None for g in optimizer.param_groups for p in g["params"])


def test_who_goes_back_to_the_beginning_begins_anew() -> None:
    """An optimizer that is kept, with what it counts in its groups."""
    mine = parameters()
    state = OptimizerState(lambda given: make(f"{OWN}:Counting", given), mine)
    start = copy.deepcopy(state.optimizer.param_groups[0]["k"])
    state.clear()
    state.restored()
    set_gradients(mine, 5)
    with state.stepping():
        state.optimizer.step()
    assert state.optimizer.param_groups[0]["k"] == start + 1
    assert "late" not in state.fresh and "never" in state.fresh
    state.clear()
    state.restored()
    assert state.optimizer.param_groups[0]["k"] == start
    assert state.fresh == set(mine)


def test_a_first_step_that_breaks_off_leaves_a_worker_that_can_go_on() -> None:
    """It had raised ConfigError for what had no state yet, which ends a job."""
    batch = torch.ones(1, 2)
    with attached(job_of(), Summing) as engine:
        assert engine._groups is not None

        def breaks(*_: Any) -> None:
            raise torch.OutOfMemoryError("as it were")

        groups, engine._model.optimizer.step = engine._groups, breaks  # type: ignore[method-assign]
        with pytest.raises(torch.OutOfMemoryError):
            run_step(engine, 1, [batch])
        assert not engine.intact and engine.detach() == {}
        assert not engine.attach(groups)
        engine.initialise()
        engine.restored()
        assert engine.state() and not run_step(engine, 1, [batch])[2].skipped


class Summing(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 1)

    def forward(self, x: Tensor) -> Any:
        return super().forward(x).sum(), len(x)


def test_numbers_are_listed_with_their_values() -> None:
    mine = parameters()
    state = OptimizerState(lambda given: make(f"{OWN}:Counting", given), mine)
    state.clear()
    state.restored()
    for step in (4, 5):
        set_gradients(mine, step)
        with state.stepping():
            state.optimizer.step()
    listed = kept(state, mine)
    assert listed["matrix.step"].item() == 2 and listed["matrix.seen"].item() is True
    assert listed["never.step"].item() == 0 and listed["never.seen"].item() is False
    assert listed["group0.k"].item() == 2 and listed["group0.d"].item() == 2.5


def test_settings_of_groups_are_no_state() -> None:
    for name in OPTIMIZERS:
        state = OptimizerState(lambda given, name=name: make(name, given), parameters())
        found = {key.partition(".")[2] for key, _ in state.of_groups()}
        own = {f"{OWN}:Counting": {"k", "d"}, f"{OWN}:Slowing": {"k"}}
        averaging = {"k", "lr_max", "scheduled_lr", "train_mode", "weight_sum"}
        own |= {name: averaging for name in OPTIMIZERS if name.startswith("schedule")}
        assert found == own.get(name, set()), name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Listing", "Listing keeps past as list: only tensors and numbers are carried"),
        ("Packed", "Packed keeps packed as Quantised: only plain tensors are carried"),
    ],
)
def test_what_cannot_be_carried_is_refused_by_name(name: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=f"optimizer.name: {expected}"):
        OptimizerState(lambda given: make(f"{OWN}:{name}", given), parameters())


@pytest.mark.parametrize(("dtype", "fused"), [(torch.float32, True), (torch.complex64, None)])
def test_a_complex_parameter_takes_torchs_default_step(
    dtype: torch.dtype, fused: bool | None
) -> None:
    """torch makes a fused one all the same, whose steps then fail."""
    given = {**parameters(), "other": nn.Parameter(torch.ones(2, 2, dtype=dtype))}
    for name in ("adam", "adamw"):
        made = make_optimizer(config_of(name, {}), given, fused=True)
        assert [group["fused"] for group in made.param_groups] == [fused] * 2
        materialise(made)
        assert len(made.state) == len(given)


def test_what_comes_later_is_refused_by_name() -> None:
    mine = parameters()
    state = OptimizerState(lambda given: make(f"{OWN}:Late", given), mine)
    state.clear()
    state.restored()
    for step in (4, 5):
        set_gradients(mine, step)
        with state.stepping():
            state.optimizer.step()
    with pytest.raises(ConfigError, match="Late keeps second of matrix"):
        kept(state, mine)


def test_numbers_of_all_parameters_are_no_stages() -> None:
    with pytest.raises(ConfigError, match="Counting keeps d, k for all parameters"):
        OptimizerState(lambda given: make(f"{OWN}:Counting", given), parameters(), staged=True)


# ------------------------------------------------------------------------------- the rehearsal


def rehearsed(name: str, *, sharded: bool, dimensions: tuple[int, ...] = (1, 2)) -> None:
    if name == "torch.optim:Muon":
        dimensions = (2,)
    rehearse(lambda given: make(name, given), dimensions, sharded=sharded)


@pytest.mark.parametrize("name", [*OPTIMIZERS, "torch.optim:Muon"])
def test_whole_parameters_can_have_any_of_these(name: str) -> None:
    rehearsed(name, sharded=False)


CANNOT = {"Adafactor": "placement", "Rprop": "placement", "Muon": "takes matrices as a whole"}


@pytest.mark.parametrize("name", [*OPTIMIZERS, "torch.optim:Muon"])
def test_some_need_whole_parameters(name: str) -> None:
    kind = name.rpartition(":")[2]
    if kind not in CANNOT:
        rehearsed(name, sharded=True)
        return
    expected = "DTensor" if name == "transformers:Adafactor" else CANNOT[kind]
    with pytest.raises(ConfigError, match=f"optimizer.name: {kind} .*{expected}") as caught:
        rehearsed(name, sharded=True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "sharded", "expected"),
    [
        ("Blocks", True, "Blocks keeps blocks as a plain tensor where parameters are sharded"),
        ("Inward", False, "Inward keeps count as an attribute of its own"),
        ("Late", False, "Late keeps second of of 1 dimensions"),
        ("Packed", False, "Packed keeps packed as Quantised"),
    ],
)
def test_a_rehearsal_refuses_by_name(name: str, sharded: bool, expected: str) -> None:
    with pytest.raises(ConfigError, match=f"optimizer.name: {expected}"):
        rehearsed(f"{OWN}:{name}", sharded=sharded)
    if sharded:
        rehearsed(f"{OWN}:{name}", sharded=False)


def test_which_begin_with_zeros() -> None:
    found = {n for n in OPTIMIZERS if begins_with_zeros(lambda given, n=n: make(n, given), (1, 2))}
    assert {"adamw", "adam", "torch.optim:RMSprop"} <= found
    assert not found & {"torch.optim:NAdam", "torch.optim:ASGD", "torch.optim:Rprop"}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_fused_sgd_is_of_whole_parameters(strategy: str) -> None:
    """torch says so in the first step, after ranks have agreed on it."""
    job = parse_job(
        {
            "name": "fused",
            "steps": 1,
            "model": {"preset": "decoder-1m"},
            "data": {"url": "stdlib:"},
            "optimizer": {"name": "sgd", "kwargs": {"fused": True}},
            "parallel": {"strategy": strategy},
        }
    )
    model = nn.Linear(2, 2, device="meta")
    if strategy == "ddp":
        check_optimizer(job, model)
        return
    with pytest.raises(ConfigError, match="SGD can't step where parameters are sharded"):
        check_optimizer(job, model)


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_who_needs_a_gpu_is_not_judged_by_a_cpu(device: str) -> None:
    """The rehearsal is on the CPU, and workers may have what it has not."""
    job = parse_job(
        {
            "name": "rehearsed",
            "steps": 1,
            "model": {"preset": "decoder-1m"},
            "data": {"url": "stdlib:"},
            "optimizer": {"name": f"{OWN}:OfGpus"},
            "parallel": {"device": device},
        }
    )
    model = nn.Linear(2, 2, device="meta")
    if device == "auto":
        check_optimizer(job, model)
        return
    with pytest.raises(ConfigError, match="no kernel for the CPU"):
        check_optimizer(job, model)
