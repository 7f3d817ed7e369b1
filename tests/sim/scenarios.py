"""Random scenarios for the simulator: a seed is a scenario, on any machine."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from elastic_ft.core.layouts.layout import Strategy
from elastic_ft.core.layouts.planner import Limits, Planning
from elastic_ft.core.layouts.work import Devices, ModelShape, Work
from elastic_ft.sim import SimFault, SimScenario, sim_policy

KINDS = {  # kind of fault -> how often it is drawn
    "crash_worker": 6,
    "crash_every_worker": 1,
    "crash_keeper": 2,
    "hang_keeper": 2,
    "crash_node": 4,
    "hang_worker": 3,
    "partition_node": 3,
    "drain_node": 3,
    "break_collective": 2,
    "raise_error": 1,
    "damage_memory": 2,
    "damage_checkpoint": 1,
    "store_down": 2,
    "slow_network": 2,
    "crash_controller": 1,
    "request_stop": 1,
}
CHANGES = ("resize", "resize", "slow_worker")  # drawn apart: what no fault is
OUTAGES = {  # drawn apart, and often together with the loss of all that is in memory
    "store_down": 3,
    "store_half_down": 2,
    "publisher_silent": 1,
    "spoil_node": 2,
    "close_ports": 2,
    "hush_keeper": 2,
}
SUCCESSIONS = {  # drawn apart: what a controller, and the next one, must get right
    "crash_controller": 3,
    "stop_controller": 3,
    "lose_keeper_line": 2,
}
ADOPTIONS = {  # only where they are asked for: who trains goes on without a controller
    "kill_controller": 3,
    "halt_controller": 2,
    "lose_controller": 2,
}
ENDINGS = {  # drawn apart, as the job ends
    "store_unwritten": 3,
    "store_down": 3,
    "publisher_silent": 1,
    "crash_worker": 2,
    "crash_node": 1,
    "drain_node": 1,
    "hang_worker": 1,
}
WITH_IT = ("crash_worker", "crash_node", "crash_keeper", "hang_worker", "break_collective")
PHASES = ("running", "running", "running", "pausing", "forming", "suspended")


# A model that fits a device hardly: the planner cuts it up, and into stages where it must.
SHAPE = ModelShape(
    layers=4,
    dim=1024,
    heads=4,
    kv_heads=4,
    ffn_dim=4096,
    vocabulary=8000,
    sequence_length=512,
    block_parameters=17_000_000,
    embedding_parameters=8_000_000,
    output_parameters=8_000_000,
)
PLANNING = Planning(
    Work(SHAPE, 12),
    Devices((1,), 1.2e9, inter_bytes_per_s=2e9),
    Limits(micro_batches=(1,), recompute=(True,)),
)


def make_scenario(seed: int, strategy: Strategy | None = None) -> SimScenario:
    """Returns the scenario of ``seed``: 2 to 6 workers, 1 or 2 to a node, 1 to 6 faults."""
    rng = random.Random(seed)
    per_node = rng.choice((1, 2))
    workers = rng.randint(2, 6)
    nodes = -(-workers // per_node) + rng.choice((0, 0, 1))
    steps = rng.randint(8, 16)
    strategies: tuple[Strategy, ...] = ("ddp", "fsdp", "hsdp")
    drawn = rng.choice(strategies)
    scenario = SimScenario(
        seed=seed,
        policy=sim_policy(
            rng.randint(1, workers),
            workers,
            strategy=strategy or drawn,
            shard_size=rng.choice((None, 2, 3)),
            copies=rng.choice((1, 2, 2, 3)),
        ),
        nodes=nodes,
        workers_per_node=per_node,
        steps=steps,
        keepers=rng.random() < 0.8,
        snapshot_every=rng.choice((1, 1, 2, 3)),
        checkpoint_every=rng.choice((0, 2, 3, 5)),
        faults=tuple(_fault(rng, steps) for _ in range(rng.randint(1, 6))),
        latency_s=rng.choice((0.005, 0.05, 0.5)),
        duplicates=rng.choice((0.0, 0.0, 0.1)),
        patience_s=(0.0, 2.5)[seed // 7 % 2],
        spread_s=rng.choice((0.0, 0.3, 1.0)),
    )
    scenario = _with_network(scenario, random.Random(f"network {seed}"))
    scenario = _with_policy(scenario, random.Random(f"policy {seed}"))
    scenario = _with_outages(scenario, random.Random(f"outages {seed}"))
    scenario = _with_successions(scenario, random.Random(f"successions {seed}"))
    scenario = _with_endings(scenario, random.Random(f"endings {seed}"))
    from_scratch = random.Random(f"scratch {seed}").random() < 0.7
    ep = random.Random(f"experts {seed}").choice((1, 1, 2, 4))
    return _under(scenario, from_scratch=from_scratch, ep=ep)


def _under(scenario: SimScenario, **policy: Any) -> SimScenario:
    """The scenario with some of its policy changed."""
    return replace(scenario, policy=replace(scenario.policy, **policy))


def _with_network(scenario: SimScenario, rng: random.Random) -> SimScenario:
    """One in four is bad in both ways at once: what is stale and comes twice finds the next
    generations still forming."""
    if rng.random() < 0.25:
        return replace(scenario, latency_s=0.5, duplicates=0.3)
    return scenario


def _with_policy(scenario: SimScenario, rng: random.Random) -> SimScenario:
    """Every other job has spares, worlds in multiples, or changes that someone asks for."""
    if rng.random() < 0.5:
        return scenario
    each = rng.choice((1, 1, 2))
    spares = rng.choice((0, 0, 1, 2))
    changes = [_fault(rng, scenario.steps, rng.choice(CHANGES)) for _ in range(rng.randint(0, 2))]
    policy = replace(
        scenario.policy,
        min_workers=min(scenario.policy.min_workers, scenario.policy.max_workers // each * each),
        multiple_of=each,
        spares=spares,
        evict_stragglers=rng.random() < 0.5,
    )
    return replace(
        scenario,
        policy=policy,
        nodes=scenario.nodes + -(-spares // scenario.workers_per_node),
        faults=(*scenario.faults, *changes),
    )


def _with_outages(scenario: SimScenario, rng: random.Random) -> SimScenario:
    """Every third job: what its next state is to come from can't be had when it is needed."""
    if rng.random() < 0.65:
        return scenario
    kind = rng.choices(list(OUTAGES), list(OUTAGES.values()))[0]
    outage = replace(_fault(rng, scenario.steps, kind), phase="running", lasts_s=rng.uniform(3, 40))
    faults = [outage]
    if kind == "close_ports":  # for who comes there next
        faults.append(replace(outage, kind="crash_worker_there", after_s=outage.after_s + 0.2))
    elif rng.random() < 0.7:
        faults.append(replace(outage, kind="crash_everything", after_s=outage.after_s + 0.2))
    return replace(scenario, faults=(*scenario.faults, *faults))


def _with_successions(scenario: SimScenario, rng: random.Random) -> SimScenario:
    """Every third job: its controller is followed by another, once or twice; or a keeper is not
    heard by its worker, and its controller goes."""
    if rng.random() < 0.65:
        return scenario
    kinds = rng.choices(list(SUCCESSIONS), list(SUCCESSIONS.values()), k=rng.choice((1, 2, 2)))
    faults = [_fault(rng, scenario.steps, kind) for kind in kinds]
    return replace(scenario, faults=(*scenario.faults, *faults))


def _with_endings(scenario: SimScenario, rng: random.Random) -> SimScenario:
    """Two of three are complete with their last state in a checkpoint; half of those have trouble
    as they end."""
    if rng.random() < 0.33:
        return scenario
    scenario = _under(scenario, final_checkpoint=True)
    kinds = rng.choices(list(ENDINGS), list(ENDINGS.values()), k=rng.choice((0, 0, 1, 2)))
    faults = [_at_the_end(rng, scenario.steps, kind) for kind in kinds]
    return replace(scenario, faults=(*scenario.faults, *faults))


def _at_the_end(rng: random.Random, steps: int, kind: str) -> SimFault:
    after_s, lasts_s = round(rng.uniform(0.0, 6.0), 3), round(rng.uniform(3.0, 20.0), 3)
    return SimFault(kind, steps - 1, "running", after_s, rng.randrange(12), lasts_s)


def _fault(rng: random.Random, steps: int, kind: str | None = None) -> SimFault:
    drawn = rng.choices(list(KINDS), list(KINDS.values()))[0]
    return SimFault(
        kind=kind or drawn,
        at_step=rng.randint(0, steps - 1),
        phase=rng.choice(PHASES),
        after_s=round(rng.choice((0.0, rng.uniform(0, 0.2), rng.uniform(0, 3.0))), 3),
        target=rng.randrange(12),
        lasts_s=round(rng.uniform(0.5, 25.0), 3),
    )


def adopted(seed: int, strategy: Strategy | None = None) -> SimScenario:
    """The faults of ``seed``, and one to three ends of a controller that the next one adopts after:
    half of them together with another loss, a third of them twice in a row."""
    scenario, rng = make_scenario(seed, strategy), random.Random(f"adoption {seed}")
    faults = []
    for kind in rng.choices(list(ADOPTIONS), list(ADOPTIONS.values()), k=rng.choice((1, 2, 3))):
        fault = replace(
            _fault(rng, scenario.steps, kind), lasts_s=rng.choice((0.3, 1.0, 6.0, 12.0))
        )
        faults.append(fault)
        if rng.random() < 0.5:
            after_s = round(fault.after_s + rng.uniform(0.0, 1.0), 3)
            faults.append(replace(fault, kind=rng.choice(WITH_IT), after_s=after_s, lasts_s=6.0))
        if rng.random() < 0.33:
            after_s = round(fault.after_s + fault.lasts_s + rng.uniform(0.0, 1.5), 3)
            faults.append(replace(fault, kind="kill_controller", after_s=after_s))
    end = random.Random(f"adopted end {seed}")
    if end.random() < 0.4:
        kind = end.choice(list(ADOPTIONS))
        faults.append(
            replace(_at_the_end(end, scenario.steps, kind), lasts_s=end.choice((0.3, 6.0)))
        )
    return replace(scenario, faults=(*scenario.faults, *faults), adopts=True)


def bearable(seed: int, strategy: Strategy, copies: int) -> SimScenario:
    """A scenario that costs no committed step, with ``copies`` of everything and keepers.

    One copy: a worker or all of them are lost, no node. Two: or one node. Three: two nodes at once.
    """
    rng = random.Random(f"bearable {copies} {seed}")
    per_node = rng.choice((1, 2))
    workers = rng.randint(max(3, per_node * (copies - 1) + 1), 6)  # on as many nodes as copies
    nodes = max(copies + 1, 3, -(-workers // per_node))
    steps = rng.randint(8, 12)
    kinds = {
        1: ("crash_worker", "hang_worker", "crash_every_worker"),
        2: ("crash_worker", "crash_node", "hang_worker", "drain_node"),
        3: ("crash_node",),
    }
    kind = rng.choice(kinds[copies])
    at_step, after_s = rng.randint(1, steps - 2), rng.uniform(0, 2.0)
    fault = SimFault(kind, at_step, "running", after_s, rng.randrange(12), 6.0)
    return SimScenario(
        seed=seed,
        policy=sim_policy(
            1, workers, strategy=strategy, shard_size=rng.choice((None, 2, 3)), copies=copies
        ),
        nodes=nodes,
        workers_per_node=per_node,
        steps=steps,
        snapshot_every=rng.choice((1, 2)),
        faults=(fault,) * max(1, copies - 1),  # the second takes another node: the first is gone
        patience_s=(0.0, 2.5)[seed // 7 % 2],
        spread_s=rng.choice((0.0, 0.3, 1.0)),
    )


def large(seed: int, strategy: Strategy | None = None) -> SimScenario:
    """The faults of ``seed`` in a world of 64 workers: many are lost and paused at a time."""
    scenario = make_scenario(seed, strategy)
    scenario = _under(scenario, min_workers=16, max_workers=64, multiple_of=1, copies=2)
    return replace(scenario, nodes=17, workers_per_node=4, steps=8)
