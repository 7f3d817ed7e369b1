"""A scenario on the simulator: the real core under a virtual clock."""

from __future__ import annotations

from collections import Counter

from chaos import fault_kinds as kinds
from chaos.check import Verdict
from chaos.outcome import ScenarioOutcome
from chaos.scenario import Scenario
from elastic_ft import sim

FOREVER_S = 1e6
FOLLOWED_S = 5.0  # until another controller is there, cold
STEPS_AFTER = 8  # the last fault
STEPS_TO_NEXT = 3  # from a fault to one that is keyed by an event after it
KINDS_OF_KILL = {
    "node": "crash_node",
    "worker": "crash_worker",
    "keeper": "crash_keeper",
    "controller": "kill_controller",
}
KINDS_OF_ACTION = {
    "kill": "crash_worker",
    "abort": "crash_worker",
    "oom": "crash_worker",
    "stop": "hang_worker",
    "hang": "hang_worker",
    "raise": "raise_error",
    "corrupt": "damage_memory",
    "corrupt_own": "damage_memory",
}
PHASES = {"suspended": "suspended", "pausing": "pausing"}  # other events: in any change after them


def simulate_scenario(name: str, scenario: Scenario) -> ScenarioOutcome:
    outcome = ScenarioOutcome(name, "sim")
    simulated = translated(scenario)
    try:
        report = sim.simulate(simulated)
    except sim.SimViolation as violation:
        outcome.verdicts = [
            Verdict("invariants hold in the simulated world", False, f"{violation}")
        ]
        return outcome
    wanted = Counter(fault.kind for fault in simulated.faults)
    missed = wanted - report.fired
    lost, limit = report.steps_lost, scenario.expect.steps_lost_max
    outcome.verdicts = [
        Verdict("invariants hold in the simulated world", True, f"{report.events} events"),
        Verdict("every fault fired", not missed, f"never: {dict(missed)}" if missed else "all"),
    ]
    if limit is not None:
        claim = f"at most {limit} committed steps are lost"
        outcome.verdicts.append(Verdict(claim, lost <= limit, f"{lost}"))
    outcome.summary = f"{report.generations} generations in {report.virtual_s:.0f} virtual s"
    return outcome


def translated(scenario: Scenario) -> sim.SimScenario:
    cluster, job = scenario.cluster, scenario.job
    elastic, parallel = job.get("elastic", {}), job.get("parallel", {})
    workers = cluster.nodes * cluster.workers_per_node
    faults, step = [], 0
    for fault in scenario.faults:
        own = fault.step if isinstance(fault, kinds.AtPoint) else fault.at_step
        later = 0 if isinstance(fault, kinds.AtPoint) else STEPS_TO_NEXT
        step = step + later if own is None else max(step, own)
        faults.append(_fault(fault, step))
    return sim.SimScenario(
        seed=scenario.seed,
        policy=sim.sim_policy(
            elastic.get("min_workers", 1),
            elastic.get("max_workers", workers),
            strategy=parallel.get("strategy", "fsdp"),
            shard_size=parallel.get("shard_size"),
        ),
        nodes=cluster.nodes,
        workers_per_node=cluster.workers_per_node,
        steps=step + STEPS_AFTER,
        faults=tuple(faults),
        adopts=any(
            isinstance(fault, (kinds.KillHead, kinds.StopHead)) for fault in scenario.faults
        ),
    )


def _fault(fault: kinds.External | kinds.AtPoint, step: int) -> sim.SimFault:
    phase = "running"
    if isinstance(fault, kinds.External) and fault.at_event is not None:
        phase = PHASES.get(fault.at_event, "running")
    kind, target, lasts_s = "", 0, FOREVER_S
    if isinstance(fault, kinds.AtPoint):
        kind, target = KINDS_OF_ACTION[fault.action], fault.rank or 0
        phase = "forming" if fault.point in ("forming", "connecting", "resharding") else phase
    elif isinstance(fault, kinds.Kill):
        kind, target = KINDS_OF_KILL[fault.kill], fault.of_rank
    elif isinstance(fault, kinds.KillHead):
        kind, lasts_s = KINDS_OF_KILL[fault.kill], FOLLOWED_S
    elif isinstance(fault, kinds.StopHead):
        kind, lasts_s = "halt_controller", FOLLOWED_S
    elif isinstance(fault, kinds.Stop):
        kind, target = f"hang_{fault.stop}", fault.of_rank
        lasts_s = FOREVER_S if fault.lasts_s is None else fault.lasts_s
    elif isinstance(fault, kinds.Drain):
        kind, target, lasts_s = "drain_node", fault.of_rank, fault.deadline_s
    elif isinstance(fault, kinds.Add):
        kind = "add_node"
    elif isinstance(fault, kinds.StoreNeeds):
        kind, lasts_s = "store_down", fault.lasts_s
    elif isinstance(fault, kinds.Network):
        kind, target, lasts_s = "partition_node", fault.of_rank, fault.lasts_s
    assert kind, f"{fault} has no counterpart in the simulator"
    return sim.SimFault(kind, step, phase, 0.0, target, lasts_s)
