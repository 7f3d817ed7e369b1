"""The launcher of a run on plain processes: their parent, and nobody else's child.

It forks workers, keepers and controllers, in milliseconds, since it was forked from a process that
had imported what they need (``warm``). Of each it tells the controller when it ends, and how. One
thread, one loop: nothing else may run where processes fork.

Of a run it watches the controller: another one follows on one that was killed, has crashed, or
makes no sign of life (it is left alone: whoever has the newest owner's object is in charge,
``storage.owners``). The controller watches the launcher (``to_launcher``), and where both are gone
keepers do (``guard``): of one that is killed, or says nothing, another takes over who is there.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from elastic_ft.hosts.local import children, forked_call, guard, orders
from elastic_ft.observe import scratch
from elastic_ft.transport.title import set_title
from elastic_ft.worker import birth

LOOK_S = 0.25
CONTROLLERS_MAX = 5  # that end in a row without a step between them
LEFT_S = 1800.0  # for who is left without a controller to end: keepers save first


@dataclass(slots=True, eq=False)
class Attached:
    """Who has connected."""

    line: orders.Packets
    hello: orders.Attend | None = None


@dataclass(slots=True)
class Charge:
    """The controller that is followed by another one if it must be.

    Attributes:
        silent_s: without a sign of life, as far as this process was awake.
        trained: a step was committed.
    """

    name: str
    pid: int
    silent_s: float = 0.0
    trained: bool = False


def main(fd: int) -> None:
    """Of the warm process: by now all is imported."""
    birth.passed("imports_s")
    set_title("ef-warm")
    line = orders.Packets(socket.socket(fileno=fd), orders.TO_WARM)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a launcher
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    while True:
        try:
            order, handle = line.receive_with_handle()
        except EOFError:  # who has started it is gone
            os._exit(0)
        if os.fork() == 0:
            line.close()
            forked_call.answer_call(order, handle)
            serve(order, socket.socket(fileno=handle))
        os.close(handle)


def serve(order: orders.Order, listener: socket.socket) -> NoReturn:
    """Of the process that was forked for it."""
    code = 1
    try:
        Launcher(order, listener).run()
        code = 0
    except Exception:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


class Launcher:
    def __init__(self, order: orders.Order, listener: socket.socket) -> None:
        self._order, self._listener = order, listener
        self._poll = select.poll()
        self._handlers: dict[int, Callable[[], None]] = {}
        self._attached: dict[int, Attached] = {}
        self._forked = _by_name(order.forked)
        self._pidfds: dict[str, int] = {}
        self._nodes = dict(order.nodes)
        self._charge: Charge | None = None
        self._interrupts = 0  # to be passed on to the controller
        self._in_vain = 0  # controllers in a row that have ended without a step
        self._outcome: orders.RunEnded | None = None
        self._is_anothers = False  # what runs: its controller is nobody that was forked here
        self._left_at_s = 0.0  # since when nobody is in charge any more

    def run(self) -> None:
        self._begin()
        before_s = time.monotonic()
        while not self._is_done():
            told = [(fd, self._handlers[fd]) for fd, _ in self._poll.poll(LOOK_S * 1000)]
            for fd, handler in told:  # closed by one before it, its number may be another's
                if self._handlers.get(fd) is handler:
                    handler()
            self._pass_on_interrupts()
            now_s = time.monotonic()
            self._look_at_controller(min(now_s - before_s, 2 * LOOK_S))
            before_s = now_s
        shutil.rmtree(self._order.folder, ignore_errors=True)

    def _begin(self) -> None:
        order = self._order
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in children.INTERRUPTS:
            signal.signal(number, lambda *_: self._interrupt())
        if order.run is not None:
            _detach(order.run.log)
        set_title("ef-launcher")
        scratch.claim(Path(order.folder))
        self._attend_to(self._listener.fileno(), self._accept)
        if order.owner is not None:
            with contextlib.suppress(ProcessLookupError):
                self._attend_to(os.pidfd_open(order.owner), self._leave_alone)
            if not orders.ticks_of(order.owner):
                self._leave_alone()
        for process in order.forked:
            self._take(process)
        if order.run is not None:
            found = self._forked.get(order.in_charge)
            if found is None:
                self._start_controller()
                return
            self._charge = Charge(found.name, found.pid)
            if found.ended:  # while this process imported
                self._controller_ended(found)

    def _attend_to(self, fd: int, handler: Callable[[], None]) -> None:
        self._handlers[fd] = handler
        self._poll.register(fd, select.POLLIN)

    def _forget(self, fd: int) -> None:
        with contextlib.suppress(KeyError):
            del self._handlers[fd]
            self._poll.unregister(fd)

    # ------------------------------------------------------------------- who asks

    def _accept(self) -> None:
        if not orders.is_readable(self._listener.fileno()):  # who called was let in out of turn
            return
        sock, _ = self._listener.accept()
        attached = Attached(orders.Packets(sock, orders.TO_LAUNCHER))
        fd = attached.line.fileno()
        self._attached[fd] = attached
        self._attend_to(fd, lambda: self._hear(attached))

    def _hear(self, attached: Attached) -> None:
        try:
            message = attached.line.receive(0.0)
        except EOFError:
            self._hang_up(attached)
            return
        if isinstance(message, orders.Attend):
            self._admit(attached, message)
        elif isinstance(message, orders.Interrupt):
            self._interrupt()
        elif isinstance(message, orders.ControllerLives):
            self._answer(message, attached)
        elif isinstance(message, orders.NodeRequest):
            self._tell(message, "controller")
        elif message is not None and self._obeys(attached):
            self._do(message, attached)

    def _hear_out(self, pid: int) -> None:
        """All that a process said that has ended: its end may be seen before its last words."""
        while orders.is_readable(self._listener.fileno()):
            self._accept()
        for fd, attached in list(self._attached.items()):
            while fd in self._attached and orders.is_readable(fd):
                if attached.hello is not None and attached.hello.pid != pid:
                    break
                self._hear(attached)

    def _hang_up(self, attached: Attached) -> None:
        fd = attached.line.fileno()
        was_in_charge = self._obeys(attached)
        self._forget(fd)
        del self._attached[fd]
        attached.line.close()
        if was_in_charge and self._order.run is None:
            self._leave_alone()

    def _admit(self, attached: Attached, hello: orders.Attend) -> None:
        attached.hello = hello
        if hello.role == "watcher" or self._obeys(attached):
            attached.line.send(orders.ProcessTable(tuple(self._forked.values()), self._nodes))
        if hello.role == "watcher" and self._outcome is not None:
            attached.line.send(self._outcome)

    def _obeys(self, attached: Attached) -> bool:
        """Whether it is in charge: one that has a successor is not."""
        hello = attached.hello
        if hello is None or hello.role != "controller":
            return False
        return self._order.run is None or (
            self._charge is not None and hello.pid == self._charge.pid
        )

    def _do(self, message: Any, attached: Attached) -> None:
        if self._charge is not None:
            self._charge.silent_s = 0.0
        match message:
            case orders.StartProcess():
                self._start(message, attached)
            case orders.KillProcess():
                self._kill(message.name)
            case orders.KeepNodes():
                self._nodes = message.nodes
                self._note()
            case orders.RunEnded():
                self._end_run(message)
            case orders.LeaveAlone():
                self._is_anothers, self._left_at_s = True, time.monotonic()

    def _answer(self, sign: orders.ControllerLives, attached: Attached) -> None:
        attached.line.send(orders.LauncherLives())
        if self._charge is not None and self._obeys(attached):
            self._charge.silent_s = 0.0
            self._charge.trained |= sign.trained

    def _tell(self, message: Any, role: str) -> None:
        for attached in list(self._attached.values()):
            told = self._obeys(attached) if role == "controller" else True
            if told and attached.hello is not None and attached.hello.role == role:
                attached.line.send(message)

    # ------------------------------------------------------------------- processes

    def _start(self, start: orders.StartProcess, attached: Attached) -> None:
        assert attached.hello is not None
        hello = attached.hello
        environment = hello.environment | start.environment
        prepared = children.Prepared(environment, hello.path, [*self._handlers])
        pid = children.fork(prepared, lambda: self._live(start))
        process = orders.Forked(
            start.name, start.kind, start.node, pid, orders.ticks_of(pid), start.gpu
        )
        self._take(process)
        attached.line.send(orders.ProcessStarted(process))

    def _live(self, start: orders.StartProcess) -> None:
        if start.kind == "worker":
            children.worker(start)
        else:
            children.keeper(start, Path(self._order.folder))

    def _note(self) -> None:
        """For a launcher that may have to follow. A full disk ends none that lives."""
        forked, nodes = tuple(self._forked.values()), self._nodes
        if not self._outcome:
            with contextlib.suppress(OSError):
                guard.note(replace(self._order, forked=forked, nodes=nodes, in_charge=""))

    def _take(self, process: orders.Forked) -> None:
        self._forked[process.name] = process
        self._note()
        if process.ended:
            return
        try:
            fd = os.pidfd_open(process.pid)
        except ProcessLookupError:
            fd = -1
        if fd < 0 or (not orders.lives(process) and not orders.has_ended_child(process.pid)):
            if fd >= 0:
                os.close(fd)
            self._ended(process)
            return
        self._pidfds[process.name] = fd
        self._attend_to(fd, lambda: self._reap(process))

    def _reap(self, process: orders.Forked) -> None:
        fd = self._pidfds.pop(process.name)
        self._forget(fd)
        os.close(fd)
        self._ended(process)

    def _ended(self, process: orders.Forked) -> None:
        code: int | None = None
        with contextlib.suppress(ChildProcessError):  # another launcher's, which is gone
            pid, status = os.waitpid(process.pid, 0)
            code = os.waitstatus_to_exitcode(status) if pid else None
        ended = replace(process, ended=True, code=code)
        self._forked.pop(process.name, None)  # its place is that of its end
        self._forked = _by_name([*self._forked.values(), ended])
        self._note()
        if process.kind != "controller":
            self._tell(orders.ProcessEnded(ended), "controller")
        elif self._charge is not None and self._charge.name == process.name:
            self._controller_ended(ended)

    def _kill(self, name: str) -> None:
        process = self._forked.get(name)
        if process is not None and orders.lives(process):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfds[name], signal.SIGKILL)

    def _living(self, *kinds: str) -> list[str]:
        found = self._pidfds.keys()
        return [name for name in found if not kinds or self._forked[name].kind in kinds]

    # --------------------------------------------------------------- who is in charge

    def _start_controller(self) -> None:
        run, order = self._order.run, self._order
        assert run is not None
        earlier = [one.name for one in self._forked.values() if one.kind == "controller"]
        name = f"controller{1 + max(map(orders.number_of, earlier), default=-1)}"
        prepared = children.Prepared(order.environment, order.path, [*self._handlers])
        again = replace(order, in_charge=name)
        is_first = not earlier
        pid = children.fork(prepared, lambda: children.controller(again, is_first))
        self._charge = Charge(name, pid)
        self._take(orders.Forked(name, "controller", "", pid, orders.ticks_of(pid)))

    def _controller_ended(self, ended: orders.Forked) -> None:
        self._hear_out(ended.pid)
        if self._outcome is None:
            end = orders.end_in_words(ended).replace("killed", "was killed")
            _log(f"the controller, process {ended.pid}, {end}")
            self._succeed()

    def _look_at_controller(self, passed_s: float) -> None:
        charge, run = self._charge, self._order.run
        if charge is None or run is None or self._outcome is not None:
            return
        charge.silent_s += passed_s
        if charge.silent_s > run.job.elastic.heartbeat_timeout_s:
            _log(f"no sign of life of the controller, process {charge.pid}: another one follows")
            self._succeed()

    def _succeed(self) -> None:
        """The next controller takes over; unless too many did, and got nowhere."""
        assert self._charge is not None
        self._in_vain = 0 if self._charge.trained else self._in_vain + 1
        if self._in_vain < CONTROLLERS_MAX:
            self._start_controller()
            return
        line = f"{CONTROLLERS_MAX} controllers ended in a row without a step between them"
        run = self._order.run
        assert run is not None
        self._end_run(orders.RunEnded(1, f"{line}: the last one's words are in {run.log}"))

    def _interrupt(self) -> None:
        self._interrupts += 1  # a signal may come at whatever place in this program

    def _pass_on_interrupts(self) -> None:
        """To the controller; where it has just ended, to the next one."""
        fd = self._pidfds.get(self._charge.name) if self._charge is not None else None
        while self._interrupts and fd is not None:  # else its pid may be another's
            self._interrupts -= 1
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGINT)

    # ------------------------------------------------------------------------ the end

    def _end_run(self, outcome: orders.RunEnded) -> None:
        self._outcome, self._left_at_s = outcome, time.monotonic()
        guard.forget_launcher(self._order)
        if outcome.line:
            _log(outcome.line)
        self._tell(outcome, "watcher")
        for name in self._living("controller"):  # stopped ones, that have a successor
            if self._charge is None or name != self._charge.name:
                self._kill(name)

    def _leave_alone(self) -> None:
        """The owner is gone. Keepers end by themselves: they save what they have."""
        for fd in [fd for fd, handler in self._handlers.items() if handler == self._leave_alone]:
            self._forget(fd)
            os.close(fd)
        if self._order.owner is None or self._left_at_s:
            return
        for name in self._living("worker"):
            self._kill(name)
        self._left_at_s = time.monotonic()

    def _is_done(self) -> bool:
        if not self._left_at_s:
            return False
        if time.monotonic() - self._left_at_s > LEFT_S and not self._is_anothers:
            for name in self._living():
                self._kill(name)
        return not self._living()


def _detach(log: str) -> None:
    """From the terminal: its end is none of ours."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for opened, standard in ((null, 0), (out, 1), (out, 2)):
        os.dup2(opened, standard)
    os.close(null)
    os.close(out)


def _by_name(processes: Iterable[orders.Forked]) -> dict[str, orders.Forked]:
    return {process.name: process for process in orders.worth_telling(processes)}


def _log(line: str) -> None:
    with contextlib.suppress(OSError):  # a full disk is no reason to end
        print(f"{time.strftime('%H:%M:%S')} launcher: {line}", file=sys.stderr, flush=True)
