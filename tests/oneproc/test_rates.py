"""Groups of parameters with rates and decay of their own, against plain PyTorch's groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from elastic_ft.config import OptimizerConfig, parse_job
from elastic_ft.core.terms import changes, terms_of
from elastic_ft.engines.learning_rates import check_groups, learning_rate, set_rates
from elastic_ft.engines.optimizers import make_optimizer
from elastic_ft.errors import ConfigError

GROUPS: list[dict[str, Any]] = [
    {"match": "head.*", "lr": 0.02, "weight_decay": 0.5},
    {"match": "*.bias", "weight_decay": 0.1},
    {"match": "*", "lr": 0.001},
]


def model() -> nn.Module:
    torch.manual_seed(0)
    named = {"body": nn.Linear(3, 4), "norm": nn.LayerNorm(4), "head": nn.Linear(4, 2)}
    return nn.ModuleDict(named)


def config(**keys: Any) -> OptimizerConfig:
    return OptimizerConfig(lr=0.01, weight_decay=0.3, schedule="constant", **keys)


def step(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for number, parameter in enumerate(module.parameters()):
        parameter.grad = torch.full_like(parameter, 0.1 * (number + 1))
    optimizer.step()


@pytest.mark.parametrize("name", ["adamw", "sgd", "torch.optim:RMSprop"])
def test_groups_train_as_plain_pytorchs_do(name: str) -> None:
    mine, plain = model(), model()
    settings = config(name=name, groups=GROUPS)
    optimizer = make_optimizer(settings, dict(mine.named_parameters()))
    p = dict(plain.named_parameters())
    groups = [
        {"params": [p["head.weight"], p["head.bias"]], "lr": 0.02, "weight_decay": 0.5},
        {"params": [p["body.bias"], p["norm.bias"]], "lr": 0.01, "weight_decay": 0.1},
        {"params": [p["body.weight"]], "lr": 0.001, "weight_decay": 0.3},
        {"params": [p["norm.weight"]], "lr": 0.001, "weight_decay": 0.0},
    ]
    classes = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    adam = {"betas": settings.betas, "eps": settings.eps} if name == "adamw" else {}
    theirs = classes.get(name, torch.optim.RMSprop)(groups, **adam)  # type: ignore[operator]
    for number in range(3):
        set_rates(optimizer, 0.01 / (number + 1))  # as a schedule has it
        for group, rate in zip(theirs.param_groups, (0.02, 0.01, 0.001, 0.001), strict=True):
            group["lr"] = rate / (number + 1)
        step(mine, optimizer)
        step(plain, theirs)
    for name, parameter in mine.named_parameters():
        assert torch.allclose(parameter, p[name], rtol=1e-6, atol=0), name


def test_without_groups_only_matrices_decay() -> None:
    optimizer = make_optimizer(config(), dict(model().named_parameters()))
    decays = [(g["weight_decay"], {p.dim() for p in g["params"]}) for g in optimizer.param_groups]
    assert decays == [(0.3, {2}), (0.0, {1})]


@pytest.mark.parametrize("unused", [{"match": "tail.*"}, {"match": "head.weight", "lr": 1.0}])
def test_a_group_of_nothing_is_refused(unused: dict[str, Any]) -> None:
    check_groups(config(groups=GROUPS), model())
    settings = config(groups=[GROUPS[0], unused])
    with pytest.raises(ConfigError, match=r"optimizer.groups.1.match: '.*' is no trained param"):
        check_groups(settings, model())


def test_other_groups_are_other_terms() -> None:
    def terms(groups: list[dict[str, Any]]) -> dict[str, Any]:
        values = {"name": "a", "steps": 1, "model": {"preset": "decoder-1m"}}
        job = parse_job(values | {"data": {"url": "stdlib:"}, "optimizer": {"groups": groups}})
        return terms_of(job.model_dump(mode="json"))

    assert changes(terms(GROUPS), terms(GROUPS)) == ()
    (found,) = changes(terms(GROUPS), terms(GROUPS[:2]))
    assert found.key == "optimizer.groups"


def ramp(step: int, steps: int) -> float:
    return step / steps


def broken(step: int, steps: int) -> float:
    return float("nan") if step > 1 else 1 / (step - 1)


def test_a_schedule_of_ones_own() -> None:
    settings = config().model_copy(update={"schedule": f"{__name__}:ramp"})
    assert learning_rate(settings, 10, 5) == 0.005


@pytest.mark.parametrize(
    ("name", "step", "problem"),
    [
        ("broken", 1, "failed: ZeroDivisionError"),
        ("broken", 2, "makes the rate nan"),
        ("GROUPS", 1, "is list"),
        ("none", 1, "no 'none' in"),
    ],
)
def test_a_bad_schedule_is_one_line(name: str, step: int, problem: str) -> None:
    settings = config().model_copy(update={"schedule": f"{__name__}:{name}"})
    with pytest.raises(ConfigError, match=rf"^optimizer.schedule: .*{problem}"):
        learning_rate(settings, 10, step)
