"""Every event of the journal: its name, meaning, fields, texts and metric. docs/journal.md is made
of it, as are the story of a run (``journal_text``) and what ``metrics`` counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from elastic_ft.observe import wording
from elastic_ft.observe.wording import Text

Counted = tuple[str, Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Field:
    """``unit``: "" where it has none. ``always``: every line of the event has it."""

    name: str
    meaning: str
    unit: str = ""
    always: bool = True


@dataclass(frozen=True, slots=True)
class JournalEvent:
    """Attributes:
    brief: what a person who waits is told; None if nothing.
    full: what the story of the run tells; None if nothing.
    counted: the counter that each line adds one to, and its labels.
    """

    name: str
    meaning: str
    fields: tuple[Field, ...]
    brief: Text | None
    full: Text | None
    counted: Counted | None


COMMON = (
    Field("at_s", "When the line was written.", "unix time, s"),
    Field("seq", "The line's number in the file, from 0."),
    Field("generation", "The generation at that moment; 0 before the first."),
    Field("event", "The event's name."),
    Field("reason", "Why, in words."),
)
_FIELDS = (
    Field("abort", "Whether at once."),
    Field("action", "What was done, as in the scenario."),
    Field("adopted", "Workers and keepers that live."),
    Field("after", "As in the scenario."),
    Field("again_s", "Until it is asked again.", "s"),
    Field("asked_s", "Until workers were asked for.", "s"),
    Field("at_step", "The step from which it goes on."),
    Field("away_s", "Since the last sign of the one before.", "s"),
    Field("before", "What was until then."),
    Field("buddies", "By rank: the ranks that keep copies of its snapshots."),
    Field("bytes", "Of its shards.", "bytes"),
    Field("bytes_moved", "State received.", "bytes"),
    Field("cause", "What began it."),
    Field("changes", "By key of the job: [before, now]."),
    Field("connect_s", "To reach the controller.", "s"),
    Field("controller", "Which."),
    Field("cost_s", "By which one delays a step.", "s"),
    Field("data", "What identifies it: the number of samples, a fingerprint."),
    Field("data_s", "To open the data.", "s"),
    Field("deadline_s", "When it goes; null if nobody says.", "unix time, s"),
    Field("every_s", "From one to the next.", "s"),
    Field("every_steps", "From one to the next.", "steps"),
    Field("exposed_s", "By kind: what computing waits for.", "s"),
    Field("failures", "Recoveries so far."),
    Field("fired_at_s", "When it fired.", "unix time, s"),
    Field("first_step", "The first step without a line."),
    Field("first_step_s", "From there to the first commit.", "s"),
    Field("flops_per_s", "What a device reaches.", "1/s"),
    Field("forming_s", "Until all trained.", "s"),
    Field("from_folder", "Read from the model's folder.", "bytes"),
    Field("from_peers", "From peers' memory.", "bytes"),
    Field("frames", "Of the user's code, where it was raised."),
    Field("graphs", "Compiled within the step."),
    Field("hidden_s", "By kind: what goes on while it computes.", "s"),
    Field("holder", "Who had the state."),
    Field("host", "Its machine."),
    Field("idle", "Workers without a rank: a list of {worker, reason}."),
    Field("imports_s", "To import.", "s"),
    Field("index", "Of the fault, in its scenario."),
    Field("last_step", "The last step without a line."),
    Field("lasts_s", "As in the scenario.", "s"),
    Field("layout", "Such as fsdp4."),
    Field("layout_after", "The layout after it."),
    Field("layout_before", "The layout before it."),
    Field("links", "Times the bandwidths of the job file; null: not measured."),
    Field("loss", "Mean per token."),
    Field("lost_nodes", "Nodes whose workers were lost."),
    Field("made_up", "Lines of steps.jsonl and events.jsonl that were decided, and not written."),
    Field("measured_s", "A step's time.", "s"),
    Field("members", "A list of {worker, rank, pid, node, host, raylet_pid, domain}."),
    Field("min_workers", "Of them are needed.", "workers"),
    Field("model_s", "To prepare the model.", "s"),
    Field("node", "Its node."),
    Field("nodes", "Of the keepers."),
    Field("noticed_at_s", "When it was noticed.", "unix time, s"),
    Field("noticed_s", "From the last sign of life until then, at most.", "s"),
    Field("pace_s", "Mean forward of one of its layers.", "s"),
    Field("paused_s", "From the notice until every member trains.", "s"),
    Field("phase", "Of the job: running, pausing, forming, starting or suspended."),
    Field("pid", "Its process."),
    Field("point", "Where in a step, as in the scenario."),
    Field("port", "On the controller's machine."),
    Field("predicted_s", "A step's time, by the planner.", "s"),
    Field("process_s", "Until its process was there.", "s"),
    Field("rank", "Its rank; null if it has none."),
    Field("recorded", "The last step that steps.jsonl had."),
    Field("replaces", "The lost worker."),
    Field("request", "Names the request, as in resize.json."),
    Field("run", "Names the controller."),
    Field("seconds", "To verify and publish it.", "s"),
    Field("snapshot_bytes", "All its snapshots, and its copies of peers'.", "bytes"),
    Field("source", "The farthest tier that state comes from."),
    Field("stacks", "By name: a list of frames, the innermost first."),
    Field("state_bytes", "The rank's own state.", "bytes"),
    Field("status", "completed, failed, stopped or suspended."),
    Field("step", "Which step."),
    Field("step_s", "A step's time.", "s"),
    Field("steps_lost", "Committed steps that are trained again.", "steps"),
    Field("steps_redone", "Applied by all, not committed, run again.", "steps"),
    Field("survivors", "Workers and keepers that live."),
    Field("survivors_kept_pid", "Whether anyone survived, and everyone kept its process."),
    Field("times", "How many times by now."),
    Field("told_again", "Events of the journal, since its newest snapshot."),
    Field("tokens", "Of the data.", "tokens"),
    Field("took_s", "From its start until then.", "s"),
    Field("tries", "How often it was tried, in a row."),
    Field("typical_s", "The same, of the others.", "s"),
    Field("url", "Its manifest."),
    Field("values", "What was logged, by name."),
    Field("metrics", "Other means over the same samples, by name."),
    Field("wanted", "Members, if there were enough of them.", "workers"),
    Field("warmed", "Compiled before the worker was ready."),
    Field("waited_s", "Of it, for links; null: not measured.", "s"),
    Field("warmed_s", "To compile those.", "s"),
    Field("where", "In words; empty if that is not known."),
    Field("worker", "Its name."),
    Field("workers", "Their names."),
    Field("world", "As in the scenario."),
    Field("world_after", "Members after it.", "workers"),
    Field("world_before", "Members before it.", "workers"),
    Field("world_size", "Members.", "workers"),
    Field("write_s", "What one takes.", "s"),
)
_FIELD = {field.name: field for field in (*COMMON, *_FIELDS)}
_GOES_ON = "The step from which it goes on."
_DEFAULT = "{event}: {reason}"
_OF_WORKER = "{worker}, {event}: {reason}"


def _event(
    name: str,
    meaning: str,
    fields: str = "",
    brief: Text | None = None,
    full: Text | None = _DEFAULT,
    counted: str | Counted | None = None,
    **said: str,
) -> JournalEvent:
    """Args:
    fields: names; with a "?" where not every line has it.
    full: where it is not given, ``brief``, if that is.
    said: the meaning of a field, where this event's is its own.
    """
    found = []
    for key in fields.split():
        field = _FIELD[key.removesuffix("?")]
        meaning_here = said.get(field.name, field.meaning)
        found.append(replace(field, meaning=meaning_here, always=not key.endswith("?")))
    told = brief if brief is not None and full == _DEFAULT else full
    metric = (counted, {}) if isinstance(counted, str) else counted
    return JournalEvent(name, meaning, tuple(found), brief, told, metric)


def _checkpoint(outcome: str) -> Counted:
    return ("checkpoints_total", {"outcome": outcome})


def _losses(kind: str) -> Counted:
    return ("worker_losses_total", {"kind": kind})


# fmt: off
_JOB = (
    _event("job_started", "A controller starts the job, from the seed, weights or a checkpoint.",
           "step", "{reason}", step=_GOES_ON),
    _event("job_changed", "The job file differs from the earlier run's in what may change.",
           "step changes", "{reason}", step=_GOES_ON),
    _event("changes_accepted", "It differs in what alters the training: --accept-changes.",
           "step changes", "{reason}", step=_GOES_ON),
    _event("controller_restarted", "The controller before this one did not end.",
           "step steps_lost", "another controller follows: {reason}", step=_GOES_ON),
    _event("controller_changed", "Another controller goes on; workers and keepers are to call it.",
           "controller where step workers", "{reason}", controller="Its number.",
           step="The last that is committed."),
    _event("controller_started", "A controller begins, that adopts nobody.",
           "controller host pid", "{reason}", controller="Its number."),
    _event("in_charge", "A controller goes on where another was, whose workers live.",
           "controller host pid adopted phase took_s away_s told_again made_up", "{reason}",
           controller="Its number."),
    _event("not_adopted", "Workers live, and nobody can go on from the run folder.",
           "survivors", "{reason}"),
    _event("adopted", "All of them have called it, or are known to be lost.",
           "controller took_s", "{reason}", controller="Its number."),
    _event("return_awaited", "Steps may be lost with who has not called: they have longer.",
           "controller nodes", "{reason}", controller="Its number.",
           nodes="From which nobody has called."),
    _event("controller_failed", "An exception ends the controller."),
    _event("startup", "The first step is done, or the job ends: where the last worker's time went.",
           "worker asked_s? process_s imports_s connect_s? data_s model_s forming_s? first_step_s?",
           "startup: {reason}"),
    _event("data_opened", "Most workers of the first world read this data.", "data", full=None),
    _event("metrics_served", "Where Prometheus can scrape.", "port run?", full=None),
    _event("stop_requested", "Someone asked the job to stop.",
           brief=wording.asked_to_stop,
           full="asked to stop: {reason}"),
    _event("finished", "The job has ended.", "status", full="finished: {reason}"),
)
_TRAINING = (
    _event("loop_without_steps", "The user's train loop has not begun to iterate.",
           "worker", "{worker}: {reason}"),
    _event("step_skipped", "A step changed no parameter: its gradients overflowed.",
           "step", "step {step} was skipped: {reason}"),
    _event("evaluated", "The held-out data was evaluated, after a step.",
           "step loss tokens metrics?", "step {step}: held-out loss {loss:.4f}"),
    _event("logged", "A loop of one's own logged values after it had evaluated.",
           "step values"),
    _event("between_steps", "The script's own code between two steps takes long.",
           "worker", "{worker}: {reason}"),
    _event("unregistered", "A loop of one's own changes what is not registered from step to step.",
           "worker", "{reason}"),
    _event("ranks_differ", "What a loop of one's own takes for the same on all ranks differs.",
           "step", "{reason}"),
    _event("ranks_part", "Ranks wait for each other at different places of a loop of one's own.",
           "worker", "{worker}: {reason}"),
    _event("overlap", "What rank 0's computing waits for in a step, early in a generation; again "
           "when the share has changed by a tenth, after twice as many steps each time.",
           "step step_s exposed_s hidden_s", full=None),
    _event("calibrated", "The planner goes by measured steps from now on.",
           "layout measured_s predicted_s flops_per_s waited_s? links?"),
    _event("rolled_back", "Committed steps are lost with all who held their state.",
           "step steps_lost", "rolled back to step {step}: {reason}", step="The last that stays."),
    _event("record_incomplete", "Lines of steps.jsonl and ledger.jsonl are lost, not the steps.",
           "first_step last_step"),
    _event("fault_fired", "A fault was injected into a worker, on purpose.",
           "worker index at_step fired_at_s point action lasts_s rank? step? world? after?",
           "fault injected: {reason}, {worker}", counted="faults_injected_total",
           at_step="The step in which it fired.", rank="As in the scenario.",
           step="As in the scenario."),
)
_WORLD = (
    _event("generation_formed", "Every member of a new generation trains.",
           "step layout world_size wanted idle source members buddies", wording.world_formed,
           counted="generations_total", step=_GOES_ON),
    _event("pausing", "Members leave a generation, at a step's boundary or at once.",
           "abort", full=wording.pausing),
    _event("diagnosis", "Where each member stood when a generation broke.",
           "cause workers stacks", wording.hung_in_own_code, "who stood where: {reason}",
           workers="A list of {worker, rank, node, suspect, pid, step, point, ...}."),
    _event("recovered",
           "A change of membership is over. result.json has the same, but node_lost as the cause "
           "of a worker_lost that turned out to be one.",
           "cause noticed_at_s at_step noticed_s paused_s steps_lost steps_redone source "
           "bytes_moved world_before world_after layout_before layout_after survivors_kept_pid "
           "lost_nodes", wording.RECOVERED, wording.recovered),
    _event("suspended", "Training waits for workers, or for a store that can't be read.",
           "workers min_workers?", "suspended: {reason}", workers="How many are usable."),
    _event("resize_requested", "Someone asked for another number of workers.",
           "workers request before?", wording.resized, workers="How many.",
           before="How many might be there until then; the same: they are to be elsewhere."),
    _event("resize_refused", "The job does not do as it was asked.",
           "workers request", "resize refused: {reason}",
           workers="How many; 0 where the request could not be read."),
    _event("join_deferred", "Warm workers wait: their gain is not worth another pause yet.",
           "workers", "{reason}"),
    _event("worker_joined", "A worker is new in the world.",
           "worker rank pid node", full="{worker} is rank {rank} on {node:.12}"),
    _event("spare_used", "A warm spare takes the place of a lost worker.",
           "worker node replaces", "spare: {reason}"),
)
_WORKERS = (
    _event("worker_ready", "A worker has warmed up.", "worker node", full=None),
    _event("worker_lost", "A worker's process or node has ended, or can't be reached.",
           "worker node rank", wording.lost, counted=_losses("lost")),
    _event("worker_ended", "How the process ended of a worker that was lost before.",
           "worker", "{worker}: {reason}"),
    _event("worker_hung", "A worker stands still, and is killed.",
           "worker node rank", wording.lost, counted=_losses("hung")),
    _event("worker_raised", "The user's code raised an exception.",
           "worker step times frames?", wording.raised, counted="user_errors_total",
           times="Generations in a row in which something was raised at this step."),
    _event("worker_refused", "A worker can't take part: the user's mistake, or its machine.",
           "worker node times frames", "{worker} can't take part: {reason}",
           times="Workers unfit on this node so far."),
    _event("worker_left_out", "The world goes on without a worker with which it keeps breaking.",
           "worker node", "{worker} is left out: {reason}"),
    _event("thread_left", "A worker leaves a thread behind in a collective that never ends.",
           "worker", full=_OF_WORKER),
    _event("base_away", "A worker that begins can't read the model's weights.",
           "worker", "{worker}: {reason}"),
    _event("stepped_aside", "A worker ends that came in where it can't take part.", "worker",
           full=_OF_WORKER),
    _event("device_lost", "A worker's GPU has failed.",
           "worker node times step", "{worker} lost its GPU: {reason}",
           times="Workers unfit on this node so far."),
    _event("straggler_evicted", "A worker is slower than the others, and leaves.",
           "worker node rank pace_s typical_s", "straggler: {reason}"),
    _event("straggler_kept", "A worker is slower than the others, and stays.",
           "worker node rank pace_s typical_s", "straggler: {reason}"),
    _event("release_overdue", "A released worker has not ended, and is killed.", "worker",
           full=_OF_WORKER),
    _event("message_refused", "A worker sent what is no message, and is cut off.", "worker",
           full=_OF_WORKER),
    _event("node_lost", "A node is gone.", "node workers", "lost node {node:.12}: {reason}",
           counted="node_losses_total", node="Its name."),
    _event("node_draining", "A node has been given notice.", "node deadline_s",
           "node {node:.12} is draining: {reason}", counted="node_notices_total", node="Its name."),
    _event("drain_deferred", "Workers stay on a draining node for now.", "workers", "{reason}"),
    _event("node_avoided", "No worker is started on a node for a while.", "node",
           "node {node:.12} is avoided: {reason}", node="Its name."),
    _event("keeper_ready", "A node's keeper is there.", "node", full=None),
    _event("keeper_lost", "A node's keeper is gone.", "node",
           full="lost the keeper of node {node:.12}: {reason}"),
)
_STATE = (
    _event("source_refused", "A copy of the state is damaged, or can't be had: the next is tried.",
           "step holder tries?", "refused: {reason}", counted="sources_refused_total"),
    _event("source_unreadable", "A store or a keeper does not answer, and is asked again.",
           "step tries url? again_s? holder?", "unreadable: {reason}", url="What was read."),
    _event("awaiting_checkpoint", "A checkpoint that is being published is waited for.",
           full="{reason}"),
    _event("awaiting_keeper", "What a dead worker left with a keeper is waited for.",
           full="{reason}"),
    _event("snapshots_unkept", "No keeper has a worker's snapshots for now.", "worker node",
           full="{worker}: {reason}"),
    _event("snapshot_stuck", "A worker's snapshot does not end, and the worker does.", "worker",
           full=_OF_WORKER),
    _event("snapshot_interval", "Snapshots are taken every so many steps from now on.",
           "every_steps cost_s step_s", full=None),
    _event("residual_lost", "A replica is gone with its part of what compressed gradients owed.",
           "step"),
    _event("frozen_placed", "Weights that no snapshot has were laid out: at who joins, and rank 0.",
           "worker step from_peers from_folder", full=None),
    _event("compiled", "Layers were compiled, or found in the node's cache: of each worker once, "
           "and whenever a step had to.", "worker step graphs warmed warmed_s", full=None),
    _event("host_memory", "What a rank's snapshots take of host memory.",
           "state_bytes snapshot_bytes rank", full=None),
)
_CHECKPOINTS = (
    _event("checkpoint_committed", "A checkpoint is whole, and published.",
           "step url bytes seconds", "checkpoint of step {step}: {url}",
           counted=_checkpoint("committed")),
    _event("checkpoint_failed", "The store did not take a checkpoint; training goes on.",
           "step", "checkpoint failed: {reason}", counted=_checkpoint("failed")),
    _event("checkpoint_abandoned", "A checkpoint is given up: not all of its shards will come.",
           "step", "checkpoint of step {step} abandoned: {reason}",
           counted=_checkpoint("abandoned")),
    _event("checkpoint_refused", "A checkpoint is damaged, and never used.",
           "step url", "checkpoint refused: {reason}", counted=_checkpoint("refused")),
    _event("inbox_not_durable",
           "A remote run folder's store is away, or slow: the controller goes on. If it is lost "
           "before the store is back, the next one may not know what was decided meanwhile."),
    _event("checkpoint_warning", "Something in the store is not as it should be.",
           brief="checkpoint: {reason}"),
    _event("checkpoint_interval", "Checkpoints are written at another interval from now on.",
           "every_s write_s failures", full="checkpoints: {reason}"),
    _event("emergency_awaited", "The controller before this one died: its keepers are saving.",
           "run nodes", "{reason}"),
    _event("emergency_checkpoint", "What the keepers saved has become a checkpoint.",
           "step recorded", "{reason}"),
    _event("emergency_incomplete", "What the keepers saved makes no newer checkpoint.",
           "run step nodes", "{reason}", step="Of the newest checkpoint.",
           nodes="Whose keepers were expected, and said nothing."),
)
# fmt: on
GROUPS: dict[str, tuple[JournalEvent, ...]] = {
    "The job": _JOB,
    "Training": _TRAINING,
    "The world": _WORLD,
    "Workers and nodes": _WORKERS,
    "State": _STATE,
    "Checkpoints": _CHECKPOINTS,
}
EVENTS = {event.name: event for group in GROUPS.values() for event in group}
COUNTED = {event.name: event.counted for event in EVENTS.values() if event.counted is not None}
