"""Which schedules are simulated, which of them fail, and how to see one again."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from elastic_ft.core import commands as cmd
from elastic_ft.core import events as events
from elastic_ft.core import membership, state
from elastic_ft.core.layouts import layout
from elastic_ft.core.policy import Policy
from elastic_ft.sim import SimScenario, SimViolation, simulate

FIRST_SEED = int(os.environ.get("ELASTIC_FT_SIM_SEED", "0"))
COUNT = int(os.environ.get("ELASTIC_FT_SIM_COUNT", "500"))
STRATEGIES: tuple[layout.Strategy, ...] = ("ddp", "fsdp", "hsdp")
TAIL = 40  # lines of a failing history that are printed


def failing(scenarios: Iterable[SimScenario], **options: Any) -> Iterator[SimScenario]:
    """One after the other, as they are asked for."""
    for scenario in scenarios:
        try:
            simulate(scenario, **options)
        except (SimViolation, LookupError):  # a broken core may trip over itself first
            yield scenario


def failures(scenarios: Iterable[SimScenario], **options: Any) -> list[SimScenario]:
    return list(failing(scenarios, **options))


def is_seen(scenarios: Iterable[SimScenario], **options: Any) -> bool:
    """Whether what is wrong fails any of them: those after it are not simulated."""
    return any(True for _ in failing(scenarios, **options))


def history_of(scenario: SimScenario) -> str:
    """The end of a failing history, and how to see it again."""
    try:
        simulate(scenario, trace=True)
    except SimViolation as error:
        lines = str(error).splitlines()
        policy = scenario.policy
        again = (
            f"ELASTIC_FT_SIM_SEED={scenario.seed} ELASTIC_FT_SIM_COUNT=1 "
            f"pytest tests/sim -k schedules-{'auto' if policy.planning else policy.strategy}"
        )
        return "\n".join([str(scenario), *lines[-TAIL:], f"repeat with: {again}"])
    return "it did not fail again: the simulation is not deterministic"


def strikes_the_unreadable(
    now: state.State, event: events.Event, policy: Policy
) -> tuple[state.State, tuple[cmd.Command, ...]]:
    """Takes what can't be read for damaged."""
    if isinstance(event, events.SourceRefused):
        event = replace(event, kind=events.DAMAGED)
    return membership.step(now, event, policy)
