"""A run as a picture shows it: fed with the lines of its journal and of its steps, in bounded
memory, and told as one JSON value. ``docs/report.md`` has the fields.

The report and the service's page draw the same value with the same code (``observe.page``).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, deque
from typing import Any

from elastic_ft.config import Job
from elastic_ft.config.section import COUNT_MAX
from elastic_ft.core.layouts.layout import WISHES
from elastic_ft.errors import MALFORMED, ConfigError, one_line
from elastic_ft.observe import wording
from elastic_ft.observe.journal import EVENTS
from elastic_ft.observe.lines import Line
from elastic_ft.observe.series import Bins, Extremes, Throughput
from elastic_ft.observe.world_view import WorldView

START, TRAIN, AGAIN, PAUSE = "start", "train", "again", "pause"
SUSPENDED, END = "suspended", "end"
BAND = (TRAIN, AGAIN, PAUSE, SUSPENDED, START, END)  # kinds of wall-clock time

LOST, JOINED, CHANGED, INJECTED, IN_CHARGE = "lost", "joined", "changed", "injected", "in_charge"
MARKS = {
    "worker_lost": LOST,
    "worker_hung": LOST,
    "worker_raised": LOST,
    "worker_refused": LOST,
    "worker_left_out": LOST,
    "device_lost": LOST,
    "node_lost": LOST,
    "straggler_evicted": LOST,
    "rolled_back": LOST,
    "suspended": LOST,
    "controller_failed": LOST,
    "controller_restarted": IN_CHARGE,
    "in_charge": IN_CHARGE,
    "worker_joined": JOINED,
    "spare_used": JOINED,
    "node_draining": CHANGED,
    "resize_requested": CHANGED,
    "resize_refused": CHANGED,
    "stop_requested": CHANGED,
    "fault_fired": INJECTED,
}
ALWAYS_TOLD = {"recovered", "checkpoint_failed", "checkpoint_refused", "finished", *MARKS}
MARKS_MAX, TOLD_MAX, CHECKPOINTS_MAX, SAVED_MAX, RECOVERIES_MAX = 400, 400, 60, 200, 200
NAMES_MAX, NAMED_BUCKETS_MAX = 8, 60  # of named metrics; all are in steps.jsonl
GAP_SHOWN_S = 1.0
RATE_STEPS = 3  # that a bin of the rate has, on average, at least
RECENT_STEPS, RECENT_S = 500, 20.0  # rate and ETA: over the last of them


class RunClock:
    """Seconds of a run in which it was run: what lies between its end and another start is left
    out, and ``gaps`` says how long it was."""

    def __init__(self) -> None:
        self.began_s: float | None = None
        self.last_s = 0.0  # when something was last heard
        self.gaps: list[tuple[float, float]] = []  # x, seconds
        self._until: list[float] = []  # by gap: when it was over
        self._left_out_s: list[float] = [0.0]

    def see(self, at_s: float) -> None:
        if self.began_s is None:
            self.began_s = at_s
        self.last_s = max(self.last_s, at_s)

    def begin_again(self, at_s: float) -> None:
        if at_s <= self.last_s:
            return
        gap_s = at_s - self.last_s
        self.gaps.append((round(self.x(self.last_s), 3), round(gap_s, 3)))
        self._until.append(at_s)
        self._left_out_s.append(self._left_out_s[-1] + gap_s)

    def x(self, at_s: float) -> float:
        number = bisect_right(self._until, at_s)
        x = at_s - (self.began_s or 0.0) - self._left_out_s[number]
        if number < len(self._until):  # within the gap, or before it
            x = min(x, self.gaps[number][0])
        return max(0.0, x)


class RunView:
    """What there is to see of a run, from ``feed``."""

    def __init__(self, job: Job | None, name: str) -> None:
        self._job: Job | None = None
        self._name, self._uses_tokens = name, False
        self._clock = RunClock()
        self._loss, self._held_out = Extremes(), Extremes()
        self._named: dict[str, Extremes] = {}
        self._rate, self._band = Throughput(), Bins()
        self._world = WorldView()
        self._phase, self._since_x = "", 0.0
        self._state, self._reason, self._ended_at_s = "starting", "", 0.0
        self._last: Line = {}
        self._last_key, self._last_amount, self._seq = (-1, -1), 0.0, -1
        self._recent: deque[tuple[float, int]] = deque(maxlen=RECENT_STEPS)
        self._marks: list[dict[str, Any]] = []
        self._told: list[list[Any]] = []
        self._left_out = 0
        self._checkpoints: deque[list[Any]] = deque(maxlen=CHECKPOINTS_MAX)
        self._saved, self._saved_each = list[float](), 1  # x of each so many-th checkpoint
        self._recoveries: deque[list[Any]] = deque(maxlen=RECOVERIES_MAX)
        self._counts: Counter[str] = Counter()
        self._paused_s = self._lost_steps = self._redone_steps = 0.0
        if job is not None:
            self.know(job)

    @property
    def knows_the_job(self) -> bool:
        return self._job is not None

    def know(self, job: Job) -> None:
        self._job, self._name = job, job.name
        self._uses_tokens = job.unit == "tokens"

    def feed(
        self, events: list[Line], steps: list[Line], until_last_step: bool = False
    ) -> list[Line]:
        """Lines that are new, each kind in its order; those that come again are left out.

        Args:
            until_last_step: more steps come; events after the last of these are returned.

        Raises ConfigError, one line, where a line lacks what such a line has.
        """
        name, fed = "steps.jsonl", 0
        try:
            until_s = _time(steps[-1]["committed_at_s"]) if steps and until_last_step else math.inf
            for number, event in enumerate(events):
                name = "events.jsonl"
                if (at_s := _time(event["at_s"])) > until_s:
                    events = events[number:]
                    break
                name = "steps.jsonl"
                while fed < len(steps) and _time(steps[fed]["committed_at_s"]) <= at_s:
                    self._step(steps[fed])
                    fed += 1
                name = "events.jsonl"
                self._event(event)
            else:
                events = []
            name = "steps.jsonl"
            for step in steps[fed:]:
                self._step(step)
        except MALFORMED as error:
            what = one_line(error, 120)
            raise ConfigError(f"{name} has a line that can't be shown: {what}") from None
        return events

    def _step(self, line: Line) -> None:
        key = (line["generation"], line["step"])
        if key <= self._last_key:
            return
        at_s, loss = _time(line["committed_at_s"]), line.get("loss")
        self._clock.see(at_s)
        x = self._clock.x(at_s)
        amount = float(line["tokens"] if self._uses_tokens else line["samples"] / line["step"])
        self._loss.add(x, line["step"], None if loss is None else float(loss))
        self._add_named(x, line)
        self._rate.add(x, amount)
        self._recent.append((x, line["step"]))
        self._last, self._last_key, self._last_amount = line, key, amount
        self._counts["steps"] += 1

    def _add_named(self, x: float, line: Line) -> None:
        for name, value in (line.get("metrics") or {}).items():
            if name in self._named or len(self._named) < NAMES_MAX:
                series = self._named.setdefault(name, Extremes(NAMED_BUCKETS_MAX))
                series.add(x, line["step"], float(value) if math.isfinite(value) else None)

    def _event(self, line: Line) -> None:
        if line["seq"] <= self._seq:
            return
        self._seq, event, at_s = line["seq"], line["event"], _time(line["at_s"])
        if event == "job_started" and self._counts["starts"]:
            self._turn("", self._clock.x(self._clock.last_s))
            self._clock.begin_again(at_s)
        self._counts["starts"] += event == "job_started"
        self._clock.see(at_s)
        x = self._clock.x(at_s)
        self._follow(event, line, x)
        self._world.on(event, line, x)
        if event == "evaluated":
            self._held_out.add(x, line["step"], line["loss"])
        elif event == "recovered":
            self._recovered(line, x)
        elif event == "checkpoint_committed":
            self._saved_at(line, x)
        self._tell(event, line, x, at_s)

    def _follow(self, event: str, line: Line, x: float) -> None:
        """The job's phase: the same as goodput's in result.json (``accounts.WallClock``)."""
        if event == "job_started":
            self._state, self._reason, self._ended_at_s = "starting", line["reason"], 0.0
            self._turn(START, x if self._counts["starts"] > 1 else 0.0)
        elif event == "generation_formed":
            self._state, self._reason = "running", line["reason"]
            self._rate.begin(x)
            self._turn(TRAIN, x)
        elif event == "pausing" and self._phase != START:
            self._turn(PAUSE, x)
        elif event == "suspended":
            self._state, self._reason = "suspended", line["reason"]
            self._turn(SUSPENDED, x)
        elif event == "finished":
            self._state, self._reason = str(line["status"]), line["reason"]
            self._ended_at_s = line["at_s"]
            self._turn(END, x)
        elif event == "controller_failed":
            self._state, self._reason = "failed", line["reason"]

    def _turn(self, phase: str, x: float) -> None:
        if self._phase and x > self._since_x:
            self._band.add(self._phase, self._since_x, x, x - self._since_x)
        self._phase, self._since_x = phase, x

    def _recovered(self, line: Line, x: float) -> None:
        again = line["steps_lost"] + line["steps_redone"]
        self._paused_s += line["paused_s"]
        self._lost_steps += line["steps_lost"]
        self._redone_steps += line["steps_redone"]
        if again and self._counts["steps"]:
            trained_s = self._band.totals().get(TRAIN, 0.0)
            self._band.move(TRAIN, AGAIN, x, again * trained_s / self._counts["steps"])
        keys = "cause at_step world_before world_after layout_before layout_after paused_s"
        keys += " steps_lost steps_redone source bytes_moved survivors_kept_pid"
        self._counts["recoveries"] += 1
        self._recoveries.append([round(x, 3), *(line.get(key) for key in keys.split())])

    def _saved_at(self, line: Line, x: float) -> None:
        if self._counts["checkpoints"] % self._saved_each == 0:
            if len(self._saved) == SAVED_MAX:
                self._saved, self._saved_each = self._saved[::2], 2 * self._saved_each
            self._saved.append(round(x, 3))
        self._counts["checkpoints"] += 1
        what = [line.get(key) for key in ("step", "url", "bytes", "seconds")]
        self._checkpoints.append([round(x, 3), line["at_s"], *what])

    def _tell(self, event: str, line: Line, x: float, at_s: float) -> None:
        known = EVENTS.get(event)
        teller = "{event}: {reason}" if known is None else known.brief or known.full
        if teller is None:
            return
        text = " ".join(wording.text_of(teller, line).split())
        if not text:
            return
        kind = MARKS.get(event, "")
        if kind:
            self._mark(kind, text, x, line)
        if len(self._told) == TOLD_MAX:
            quiet = next((n for n, told in enumerate(self._told) if told[4] == "-"), 1)
            del self._told[quiet]
            self._left_out += 1
        weight = kind or ("" if event in ALWAYS_TOLD else "-")
        self._told.append([round(x, 3), at_s, line["generation"], event, weight, text])

    def _mark(self, kind: str, text: str, x: float, line: Line) -> None:
        step = line.get("step", line.get("at_step"))
        mark = {"x": round(x, 3), "kind": kind, "text": text, "step": step, "count": 1}
        self._counts[kind] += 1
        if len(self._marks) == MARKS_MAX:  # the nearest two of a kind become one: none is lost
            near = min(
                range(len(self._marks) - 1),
                key=lambda n: (
                    self._marks[n]["kind"] != self._marks[n + 1]["kind"],
                    self._marks[n + 1]["x"] - self._marks[n]["x"],
                ),
            )
            self._marks[near]["count"] += self._marks[near + 1]["count"]
            del self._marks[near + 1]
        self._marks.append(mark)

    # ----------------------------------------------------------------------------- the value

    def as_json(
        self, now_s: float, *, result: dict[str, Any] | None = None, dead: str = ""
    ) -> dict[str, Any]:
        """As of ``now_s``, where the run goes on.

        Args:
            result: what is in result.json; nothing while the run goes on.
            dead: why its controller is taken for dead.
        """
        is_over = bool(self._ended_at_s or dead or self._state == "failed")
        end_s = (self._ended_at_s or self._clock.last_s) if is_over else now_s
        now_x = self._clock.x(max(end_s, self._clock.last_s))
        band = self._band.copy()
        if self._phase and now_x > self._since_x:
            band.add(self._phase, self._since_x, now_x, now_x - self._since_x)
        wall = {kind: round(s, 3) for kind, s in band.totals().items()}
        found = {
            "version": 1,
            "name": self._name,
            "config": summary_of(self._job) if self._job is not None else [],
            "state": "dead" if dead and not self._ended_at_s else self._state,
            "reason": dead if dead and not self._ended_at_s else self._reason,
            "made_at_s": round(now_s, 3),
            "seq": self._seq,
            "began_at_s": self._clock.began_s,
            "ended_at_s": round(end_s, 3) if is_over else None,
            "now_x": round(now_x, 3),
            **self._now(is_over, now_x),
            "wall": wall,
            "goodput": round(wall.get(TRAIN, 0.0) / max(1e-9, sum(wall.values())), 4),
            "series": self._series(wall.get(TRAIN, 0.0) / max(1, self._counts["steps"])),
            "band": {"width_s": band.width_s, "kinds": band.by_kind(BAND)},
            "marks": self._marks,
            "gaps": [gap for gap in self._clock.gaps if gap[1] >= GAP_SHOWN_S],
            "checkpoints": {
                "count": self._counts["checkpoints"],
                "xs": self._saved,
                "list": list(self._checkpoints),
            },
            "recoveries": self._all_recoveries(),
            "counts": {kind: self._counts[kind] for kind in sorted(set(MARKS.values()))},
            "events": self._told,
            "events_left_out": self._left_out,
            **self._world.as_json(),
        }
        return found | {"worker_seconds": (result or {}).get("worker_seconds")}

    def _all_recoveries(self) -> dict[str, Any]:
        return {
            "count": self._counts["recoveries"],
            "paused_s": round(self._paused_s, 3),
            "steps_lost": int(self._lost_steps),
            "steps_redone": int(self._redone_steps),
            "list": list(self._recoveries),
        }

    def _now(self, is_over: bool, now_x: float) -> dict[str, Any]:
        job, step = self._job, int(self._last.get("step", 0))
        steps = job.steps if job is not None and job.steps < COUNT_MAX else None
        rate, step_s = self._pace(now_x)
        left_s = (steps - step) * step_s if steps is not None and step_s and not is_over else None
        elastic = job.elastic if job is not None else None
        return {
            "step": step,
            "steps": steps,
            "loss": self._last.get("loss"),
            "unit": "tokens" if self._uses_tokens else "samples",
            "rate": None if is_over else rate,
            "eta_s": None if left_s is None else round(left_s, 1),
            "min_workers": elastic.min_workers if elastic is not None else None,
            "max_workers": elastic.max_workers if elastic is not None else None,
            "multiple_of": job.multiple_of if job is not None else None,
        }

    def _pace(self, now_x: float) -> tuple[float | None, float | None]:
        """Amount per second, and seconds per step, of the last steps. Pauses count."""
        if self._state != "running" or len(self._recent) < 2:
            return None, None
        last_x, last = self._recent[-1]
        x, step = next((p for p in self._recent if p[0] >= last_x - RECENT_S), self._recent[0])
        spent_s = max(last_x, now_x if now_x - last_x > RECENT_S else last_x) - x
        if last <= step or spent_s <= 0:
            return None, None
        step_s = spent_s / (last - step)
        return round(self._last_amount / step_s, 2), step_s

    def _series(self, step_s: float) -> dict[str, Any]:
        width_s, values = self._rate.per_second(RATE_STEPS * step_s)
        return {
            "loss": self._loss.points(),
            "held_out": self._held_out.points(),
            "named": {name: series.points() for name, series in self._named.items()},
            "rate": {"width_s": width_s, "values": values},
        }


def _time(at_s: Any) -> float:
    found = float(at_s)
    if not math.isfinite(found):
        raise ValueError(f"{at_s} is no time")
    return found


def summary_of(job: Job) -> list[list[str]]:
    """What a reader wants to know of a job, as label and text. Nothing private: no URL of the
    data's folder, no kwargs."""
    model, data, batch, parallel, elastic = (
        job.model, job.data, job.batch, job.parallel, job.elastic
    )  # fmt: skip
    of_transformers = f"transformers: {(model.transformers or {}).get('model_type', '?')}"
    if model.pretrained is not None:
        of_transformers = f"pretrained: {model.pretrained.rstrip('/').rpartition('/')[2]}"
    source = data.path or (data.url or "its own").rstrip("/:").rpartition("/")[2]
    layout = parallel.strategy + "".join(
        f", {key} {value}" for key in WISHES if (value := getattr(parallel, key)) > 1
    )
    held = f"{elastic.min_workers} to {elastic.max_workers}, {elastic.workers_per_node} a node"
    steps = job.snapshot.every_steps
    often = "as often as is cheap" if steps == "auto" else _each(steps)
    rows = [
        ["model", "the loop's own" if model.own else model.preset or model.path or of_transformers],
        [
            "data",
            source + ("" if data.path or data.own else f", sequences of {data.sequence_length}"),
        ],
        ["steps", f"{job.steps:,}" if job.steps < COUNT_MAX else "until the loop ends"],
        ["batch", f"{batch.global_batch_size} samples, {batch.micro_batch_size} at a time"],
        ["layout", f"{layout} ({parallel.engine}), {job.precision.dtype}"],
        ["workers", held + (f", {elastic.spares} spare" if elastic.spares else "")],
        ["snapshots", f"{often}, copies: {job.snapshot.copies}"],
        ["checkpoints", _checkpoints(job)],
        ["seed", str(job.seed)],
    ]
    if not job.loop:
        optimizer = job.optimizer
        text = f"{optimizer.name}, lr {optimizer.lr:g}, {optimizer.schedule}"
        rows.insert(4, ["optimizer", text])
    if job.faults.scenario:
        rows.append(["faults", str(job.faults.scenario)])
    return rows


def _checkpoints(job: Job) -> str:
    every = job.checkpoint
    parts = [_each(every.every_steps)] if every.every_steps else []
    if every.every_s == "auto":
        parts.append("as often as pays")
    elif every.every_s:
        parts.append(f"every {every.every_s:g} s")
    return " and ".join(parts) or "at the end"


def _each(steps: int) -> str:
    return "after each step" if steps == 1 else f"every {steps} steps"
