"""Injects a scenario's external faults: a thread that knows a run by its folder alone."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from chaos import fault_kinds as kinds
from chaos.clusters import Cluster
from chaos.surroundings import Surroundings
from elastic_ft.observe.handover import is_alive
from elastic_ft.observe.lines import Line, local_path
from elastic_ft.observe.run_reader import RunReader, read_lines

POLL_S = 0.02
LOG = "chaos.jsonl"
GONE = (psutil.NoSuchProcess, ProcessLookupError, KeyError)


@dataclass(slots=True, eq=False)
class Pending:
    index: int
    fault: kinds.External
    seen: bool = False  # its event is in the journal
    error: str = ""
    hopeless: bool = False  # it can't be here


@dataclass(slots=True, eq=False)
class Underway:
    """A fault that lasts: what ends it, and when."""

    until_s: float
    until_event: str | None
    end: Callable[[], object] = field(repr=False)


class Runner:
    """Use as a context manager around the run. Every fault fires once, or is in ``unfired``.

    Args:
        resumed: the folder's run goes on: what has fired in it fires no more.

    Attributes:
        fired: what was done, in order; also in chaos.jsonl of a local run folder.
    """

    def __init__(
        self,
        faults: tuple[kinds.External, ...],
        url: str,
        cluster: Cluster,
        around: Surroundings | None = None,
        resumed: bool = False,
    ) -> None:
        folder = local_path(url)
        self._log = folder / LOG if folder is not None else None
        before = fired_in(self._log) if resumed else set()
        if not resumed and self._log is not None:
            self._log.unlink(missing_ok=True)
        self._pending = [Pending(i, fault) for i, fault in enumerate(faults) if i not in before]
        self._watch = RunReader(url).follow()
        self._cluster, self._around = cluster, around or Surroundings()
        self.fired: list[Line] = []
        self._underway: list[Underway] = []
        self._ending: list[tuple[psutil.Process, float]] = []  # who is to end, and since when
        self._adding: list[tuple[Pending, Future[object]]] = []
        self._capacity: int | None = None
        self._filling: list[Future[object]] = []
        self._choice = random.Random("capacity")
        self._armed: list[tuple[Pending, Callable[[], bool]]] = []  # of the store
        self._adder = ThreadPoolExecutor(1, thread_name_prefix="chaos-add")
        self._began_s = 0.0  # when the first generation was seen
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="chaos", daemon=True)

    def __enter__(self) -> Runner:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(60)
        self._adder.shutdown(cancel_futures=True)
        for each in list(self._underway):
            with contextlib.suppress(*GONE):
                each.end()

    @property
    def unfired(self) -> list[str]:
        """Names of the faults that have not fired, with the reason if there is one."""
        return [f"{p.fault}" + (f" ({p.error})" if p.error else "") for p in self._pending]

    def _run(self) -> None:
        while not self._over.wait(POLL_S):
            events, _ = self._watch.poll()
            names = {line["event"] for line in events}
            if self._watch.formed and not self._began_s:
                self._began_s = time.monotonic()
            now = time.monotonic()
            over = [u for u in self._underway if u.until_s <= now or u.until_event in names]
            for each in over:
                self._underway.remove(each)
                with contextlib.suppress(*GONE):
                    each.end()
            for pending in [p for p in self._pending if self._is_due(p, names)]:
                self._fire(pending)
            self._settle_adds()
            self._settle_armed()
            self._follow_capacity()
            self._see_who_ended()

    def _is_due(self, pending: Pending, names: set[str]) -> bool:
        """An event counts from the moment that the faults listed before have fired."""
        fault = pending.fault
        if pending.hopeless:
            return False
        if fault.at_s is not None:
            return bool(self._began_s) and time.monotonic() - self._began_s >= fault.at_s
        if fault.at_step is not None:
            return self._watch.step >= fault.at_step
        first = next(each for each in self._pending if not each.hopeless)
        pending.seen = pending.seen or (pending is first and fault.at_event in names)
        return pending.seen

    def _fire(self, pending: Pending) -> None:
        fault, watch = pending.fault, self._watch
        if any(pending is other for other, _ in [*self._adding, *self._armed]):
            return
        rank = getattr(fault, "of_rank", None)
        member = watch.member(rank) if rank is not None else {}
        if member is None:
            generation = watch.formed.get("generation", 0)
            pending.error = f"there is no rank {rank} in generation {generation}"
            return  # a later generation may have it
        if isinstance(fault, kinds.Add):  # takes seconds, in which others fire
            self._adding.append((pending, self._adder.submit(self._cluster.add_node)))
            return
        if isinstance(fault, (kinds.StoreNeeds, kinds.Strangers)):
            # It has fired once somebody has suffered it.
            store = isinstance(fault, kinds.StoreNeeds)
            suffered, heal = (self._around.break_store if store else self._intrude)(fault)
            self._armed.append((pending, suffered))
            self._heal_store(fault.lasts_s, suffered, heal)
            return
        # After these nothing may be written: by this process, or on this disk.
        last = isinstance(fault, kinds.FillDisk) or (
            isinstance(fault, kinds.KillHead) and fault.kill == "terminal"
        )
        if last:
            self._done(pending, member)
        try:
            acts[type(fault)](self, fault, member)
        except GONE as error:
            pending.error = f"{type(error).__name__}: {error}"
            return  # it is gone already, and the journal will say so: the next one in its rank
        except Exception as error:  # this fault can't be; the others can
            pending.error = f"{type(error).__name__}: {error}"
            pending.hopeless = True
            if last:
                self._undone(pending)
            return
        if not last:
            self._done(pending, member)

    def _heal_store(
        self, lasts_s: float, suffered: Callable[[], bool], heal: Callable[[], None]
    ) -> None:
        """After its time, or as soon as then a request has come and suffered."""

        def end() -> None:
            if suffered() or self._over.is_set():
                heal()
            else:
                self._heal_store(POLL_S, suffered, heal)

        self._then(lasts_s, end)

    def _settle_armed(self) -> None:
        for pending, suffered in list(self._armed):
            if suffered():
                self._armed.remove((pending, suffered))
                self._done(pending, {})

    def _settle_adds(self) -> None:
        for pending, future in [pair for pair in self._adding if pair[1].done()]:
            self._adding = [pair for pair in self._adding if pair[0] is not pending]
            error = future.exception()
            if error is None:
                self._done(pending, {})
            else:
                pending.error = f"{type(error).__name__}: {error}"

    def _done(self, pending: Pending, member: Line) -> None:
        self._pending.remove(pending)
        line = {
            "at_s": round(time.time(), 6),
            "fault": str(pending.fault),
            "index": pending.index,
            "at_step": self._watch.step,
            **{key: member[key] for key in ("worker", "pid", "node") if key in member},
        }
        self.fired.append(line)
        self._note(line)

    def _undone(self, pending: Pending) -> None:
        """It was noted before its time, and did not happen."""
        self.fired = [line for line in self.fired if line["index"] != pending.index]
        self._pending.append(pending)
        self._note({"undone": pending.index, "error": pending.error})

    def _note(self, line: Line) -> None:
        if self._log is not None:
            with contextlib.suppress(OSError), self._log.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def _follow_capacity(self) -> None:
        """Kills and adds until there are as many nodes as there should be."""
        if self._capacity is None:
            return
        self._filling = [future for future in self._filling if not future.done()]
        nodes = self._cluster.nodes()
        for node in self._choice.sample(nodes, max(0, len(nodes) - self._capacity)):
            with contextlib.suppress(*GONE):
                self._cluster.kill_node(node)
        if not self._filling and len(nodes) < self._capacity:
            self._filling.append(self._adder.submit(self._cluster.add_node))

    def _see_who_ended(self) -> None:
        for process, since_s in [c for c in self._ending if not is_alive(c[0])]:
            self._ending.remove((process, since_s))
            after_s = round(time.monotonic() - since_s, 3)
            self._note({"at_s": round(time.time(), 6), "ended": process.pid, "after_s": after_s})

    # ------------------------------------------------------------------- what is done

    def _then(
        self, after_s: float, end: Callable[[], object], until_event: str | None = None
    ) -> None:
        self._underway.append(Underway(time.monotonic() + after_s, until_event, end))

    def _kill(self, fault: kinds.Kill, member: Line) -> None:
        cluster, node = self._cluster, member["node"]
        if fault.kill == "worker":
            cluster.signal_worker(member["pid"], fault.signal)
        elif fault.kill == "keeper":
            os.kill(cluster.keeper_of(node), signal.SIGKILL)
        elif fault.kill == "raylet":
            cluster.kill_raylet(node)
        else:
            cluster.kill_node(node)

    def _kill_head(self, fault: kinds.KillHead, member: Line) -> None:
        if fault.kill == "controller":
            self._cluster.kill_controller()
        elif fault.kill == "launcher":
            self._cluster.kill_launcher()
        elif fault.kill == "terminal":
            self._cluster.kill_terminal()
        else:
            self._then(fault.lasts_s, self._cluster.kill_gcs())

    def _stop_head(self, fault: kinds.StopHead, member: Line) -> None:
        former = psutil.Process(self._cluster.stop_controller())

        def go_on() -> None:
            former.send_signal(signal.SIGCONT)
            self._ending.append((former, time.monotonic()))

        self._then(fault.lasts_s, go_on)

    def _intrude(self, fault: kinds.Strangers) -> tuple[Callable[[], bool], Callable[[], None]]:
        """Returns what tells whether they are all there, and what sends them away."""
        command = [sys.executable, "-m", "chaos.strangers", str(self._cluster.root_pid())]
        strangers = subprocess.Popen(
            [*command, str(fault.strangers)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert strangers.stdin is not None and strangers.stdout is not None
        came, asked = threading.Event(), strangers.stdin

        def listen() -> None:
            connections, ports = (int(each) for each in strangers.stdout.readline().split())
            line = {"at_s": round(time.time(), 6), "strangers": connections, "ports": ports}
            self._note(line)
            came.set()

        threading.Thread(target=listen, name="chaos-strangers", daemon=True).start()

        def leave() -> None:
            asked.close()
            strangers.wait()

        return came.is_set, leave

    def _stop(self, fault: kinds.Stop, member: Line) -> None:
        if fault.stop == "keeper":
            pid = self._cluster.keeper_of(member["node"])
            os.kill(pid, signal.SIGSTOP)
            go_on = partial(os.kill, pid, signal.SIGCONT)
        else:
            pid = member["pid"]
            self._cluster.signal_worker(pid, "STOP")
            go_on = partial(self._cluster.signal_worker, pid, "CONT")
        if fault.lasts_s is not None:
            self._then(fault.lasts_s, go_on)  # suppresses GONE: it may be replaced meanwhile

    def _slow(self, fault: kinds.Slow, member: Line) -> None:
        pid, over = member["pid"], threading.Event()
        self._cluster.signal_worker(pid, "STOP")  # raises if it is gone

        def slow_down() -> None:
            with contextlib.suppress(*GONE):
                while not over.wait(SLICE_S * fault.share):
                    self._cluster.signal_worker(pid, "CONT")
                    over.wait(SLICE_S * (1 - fault.share))
                    self._cluster.signal_worker(pid, "STOP")
                self._cluster.signal_worker(pid, "CONT")

        thread = threading.Thread(target=slow_down, name="chaos-slow", daemon=True)
        thread.start()

        def end() -> None:
            over.set()
            thread.join()

        self._then(fault.lasts_s, end)

    def _set_capacity(self, fault: kinds.Capacity, member: Line) -> None:
        self._capacity = fault.capacity

    def _fill(self, fault: kinds.FillDisk, member: Line) -> None:
        self._then(fault.lasts_s, self._around.fill(), fault.until_event)

    def _network(self, fault: kinds.Network, member: Line) -> None:
        node = member["node"]
        if fault.network == "cut":
            behind = [m["pid"] for m in self._watch.formed["members"] if m["node"] == node]
            self._ending += [(psutil.Process(pid), time.monotonic()) for pid in behind]
        rounds = 2 * fault.times - 1 if fault.network == "flap" else 1

        def turn(left: int) -> None:
            """Broken, healed, broken ..., healed."""
            if left % 2:
                heal = self._cluster.break_link(node, fault)
                self._then(fault.lasts_s, lambda: (heal(), turn(left - 1)))
            elif left:
                self._then(fault.lasts_s, lambda: turn(left - 1))

        turn(rounds)


SLICE_S = 0.1
acts: dict[type, Callable[[Runner, Any, Line], object]] = {
    kinds.Kill: Runner._kill,
    kinds.KillHead: Runner._kill_head,
    kinds.Stop: Runner._stop,
    kinds.StopHead: Runner._stop_head,
    kinds.Slow: Runner._slow,
    kinds.Drain: lambda me, fault, of: me._cluster.drain_node(of["node"], fault.deadline_s),
    kinds.Capacity: Runner._set_capacity,
    kinds.FillDisk: Runner._fill,
    kinds.Network: Runner._network,
}


def fired_in(log: Path | None) -> set[int]:
    """Indices of the external faults that a run folder's log says have fired."""
    lines = read_lines(log) if log else []
    undone = {line["undone"] for line in lines if "undone" in line}
    return {line["index"] for line in lines if "index" in line} - undone
