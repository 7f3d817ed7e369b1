"""What holds after every event of a shared cluster. Each breach is an AssertionError in words."""

from __future__ import annotations

from collections import Counter

from benchmarks.shared_cluster import SharedCluster
from elastic_ft.core.scheduling import decide
from elastic_ft.core.sharing import asks
from elastic_ft.core.sharing.ledger import Sharing, alike, count, why_waits

TO_A_JOB = (asks.StartJob, asks.ResizeJob, asks.SuspendJob, asks.StopJob, asks.GiveUpJob)


def check_all(
    world: SharedCluster,
    before: Sharing,
    event: asks.SharingEvent,
    commands: tuple[asks.SharingCommand, ...],
) -> None:
    check_nodes(world)
    check_line(world)
    check_sizes(world)
    check_queues(world)
    check_commands(world, before, event, commands)
    check_rest(world, event)


def check_nodes(world: SharedCluster) -> None:
    """No slot is promised twice, and the core knows who is where."""
    used: Counter[str] = Counter()
    for name, job in world.state.jobs.items():
        assert dict(job.held) == world.jobs[name].places, f"{name}: {job.held}"
        for node, workers in job.held:
            used[node] += workers * job.slots
    for node, slots in used.items():
        assert slots <= world.nodes.get(node, 0), f"{node}: {slots} slots are promised"
    for name, run in world.jobs.items():
        assert not run.places or name in world.state.jobs, f"{name} has ended and has workers"


def check_line(world: SharedCluster) -> None:
    """Each job is in the line among its like, or apart."""
    state = world.state
    waits = [name for names in state.line.values() for name in names]
    assert sorted([*waits, *state.apart]) == sorted(state.jobs)
    for kind, names in state.line.items():
        jobs = [state.jobs[name] for name in names]
        assert all(alike(job.wish) == kind and job.phase == "queued" for job in jobs)
        assert [job.number for job in jobs] == sorted(job.number for job in jobs)
    for job in state.jobs.values():
        assert job.has_room or job.releasing or job.phase == "stopping" or why_waits(state, job)


def check_sizes(world: SharedCluster) -> None:
    promised = 0
    for name, job in world.state.jobs.items():
        stays = count(job.held) - count(job.leaving)
        if job.has_room:
            assert job.least <= job.target <= job.most, f"{name}: {job.target} workers"
            assert job.target % job.unit == 0, f"{name}: {job.target} workers"
            assert job.owed == 0 or stays < job.target, name
            assert stays + job.owed == job.target, f"{name}: {stays} of {job.target}"
            promised += job.target * job.slots
        else:
            assert job.target == 0 and stays == 0, f"{name}: {job.phase} with {job.target}"
    slots = sum(world.nodes.values())
    assert promised <= slots, f"{promised} of {slots} slots are promised"


def check_queues(world: SharedCluster) -> None:
    used: Counter[str] = Counter()
    for job in world.state.jobs.values():
        used[job.wish.queue] += count(job.held) * job.slots
    for name, terms in world.terms.queues.items():
        if terms.ceiling is not None:
            assert used[name] <= terms.ceiling, f"queue {name} uses {used[name]} slots"


def check_commands(
    world: SharedCluster,
    before: Sharing,
    event: asks.SharingEvent,
    commands: tuple[asks.SharingCommand, ...],
) -> None:
    """One to each job at most, with its reason; who was resized just now does not grow."""
    told = Counter(c.job for c in commands if isinstance(c, TO_A_JOB))
    assert all(times == 1 for times in told.values()), f"{told}: {commands}"
    for command in commands:
        assert command.reason, f"{command} has no reason"
        if not isinstance(command, asks.ResizeJob):
            continue
        job = before.jobs[command.job]
        was_whole = job.owed == 0 and not isinstance(event, asks.CapacityChanged)
        if command.more and was_whole:
            cool_s = job.resized_at_s + world.terms.cooldown_s
            is_set_back = event.at_s < job.resized_at_s
            why = f"{command} at {event.at_s}, cool at {cool_s}"
            assert event.at_s >= cool_s or is_set_back, why
    own = (asks.StartFailed, asks.JobControllerLost, asks.JobSuspended)  # the job says so itself
    for name, job in world.state.jobs.items():
        if isinstance(event, own) and event.job == name:
            continue
        if name in before.jobs and job.target != before.jobs[name].target:
            assert name in told, f"{name} has another target and was not told"


def check_rest(world: SharedCluster, event: asks.SharingEvent) -> None:
    """Nothing is left to do once it is done: no target changes but by an event."""
    again, commands = decide(world.state, asks.Ticked(event.at_s), world.terms)
    assert commands == (), f"after {event} there is more: {commands}"
    assert again == world.state, f"after {event} the state goes on changing"
