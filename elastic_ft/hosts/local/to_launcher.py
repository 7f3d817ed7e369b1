"""A controller's end of the line to its launcher: if that is gone, or silent, another is started.

A launcher that is stopped keeps its connections, and its kernel answers for it. So it is asked
again and again, and one that does not answer in time is killed: woken up later, it would see a
controller that does not talk to it, and start another one.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from elastic_ft.hosts.local import orders
from elastic_ft.hosts.local.guard import LAUNCHER_S, answers, read_note
from elastic_ft.hosts.local.warm import ENVIRONMENT, fork_launcher, stop_warm
from elastic_ft.observe import scratch

log = logging.getLogger(__name__)
LAUNCHERS_MAX = 3  # that end in a row before they could do anything
AGAIN_S = 1.0  # after one that could not be started
SIGNS_PER_TIMEOUT = 8
ANSWER_S = 10.0  # for a launcher whose owner has no job's deadline for it
FOLDER = "elastic_ft_launcher_"


class Listener(Protocol):
    """The host. Called in the thread that listens."""

    def known(self) -> tuple[tuple[orders.Forked, ...], dict[str, Any]]:
        """Processes and nodes, for the launcher that is to take them over."""

    def hear(self, message: Any) -> None:
        """What the launcher tells."""

    def lost_unborn(self, forked: orders.Forked) -> None:
        """The launcher is gone, and was not heard to have forked it."""

    def gave_up(self, reason: str) -> None:
        """No launcher can be had."""


class ToLauncher:
    """Args:
    launched: the order of the launcher that has started this very process; None: there is none
        yet, the first message starts one, which ends with this process.

    Attributes:
        trained: a step was committed since the last sign of life.
    """

    def __init__(self, listener: Listener, launched: orders.Order | None) -> None:
        self._listener = listener
        self._launched, self._order = launched, launched
        self._changed = threading.Condition(threading.RLock())
        self._line: orders.Packets | None = None
        self._in_vain, self._departed = 0, False
        self._unsent: set[str] = set()  # who was to be started, while no launcher was there
        self._sign_due_s = self._silent_s = 0.0  # silent as far as this process was awake
        self._heard = False  # the launcher that it talks to now
        self.trained = False

    @property
    def is_there(self) -> bool:
        return self._line is not None

    def join(self) -> orders.ProcessTable:
        """Of the launcher that has forked this process. Raises OSError, EOFError."""
        assert self._order is not None
        self._line = self._call(Path(self._order.folder))
        table = self._line.receive(LAUNCHER_S)
        if not isinstance(table, orders.ProcessTable):
            raise EOFError("the launcher does not answer")
        self._listen()
        return table

    def ask(self, message: Any) -> bool:
        """False: it is gone. Then who is known to it is taken over by the next one."""
        with self._changed:
            if self._line is None and self._order is None:
                self._order = orders.Order(str(scratch.make(FOLDER)), owner=os.getpid())
                self._line = self._launch(self._order)
                self._listen()
            sent = self._line is not None and self._line.send(message)
            if not sent and isinstance(message, orders.StartProcess):
                self._unsent.add(message.name)
            return sent

    def depart(self, last: Any = None) -> None:
        """Ends the line, ``last`` being what it says. Bounded."""
        until_s = time.monotonic() + LAUNCHER_S
        with self._changed:
            while last is not None and not self._departed:
                if self._line is not None and self._line.send(last):
                    break
                if not self._changed.wait(until_s - time.monotonic()):  # another one comes
                    break
            self._departed = True
            if self._line is not None:
                self._line.hang_up()

    # ----------------------------------------------------------------- internals

    def _launch(self, order: orders.Order) -> orders.Packets:
        """Returns at once. Raises OSError."""
        folder = Path(order.folder)
        with orders.listen_in(folder) as listener:
            scratch.claim(folder)  # the one before it, whose the folder was, is gone
            fork_launcher(order, listener)
        self._heard, self._silent_s = False, 0.0
        return self._call(folder)

    def _call(self, folder: Path) -> orders.Packets:
        line = orders.call_in(folder)
        environment = dict(os.environ) | ENVIRONMENT
        line.send(orders.Attend("controller", os.getpid(), environment, tuple(sys.path)))
        return line

    def _listen(self) -> None:
        threading.Thread(target=self._hear_always, name="local-host", daemon=True).start()

    def _hear_always(self) -> None:
        """The launcher is heard, and hears that this process lives."""
        timeout_s = ANSWER_S
        if self._order is not None and self._order.run is not None:
            timeout_s = self._order.run.job.elastic.heartbeat_timeout_s
        every_s, before_s = timeout_s / SIGNS_PER_TIMEOUT, time.monotonic()
        while not self._departed:
            line = self._line
            try:
                if line is None:
                    raise EOFError
                message = line.receive(every_s)
                now_s = time.monotonic()
                self._note(message, min(now_s - before_s, 2 * every_s), timeout_s)
                before_s = now_s
            except EOFError:
                self._replace_launcher()
                before_s = time.monotonic()
                continue
            if isinstance(message, orders.ProcessTable):
                self._in_vain = 0
                if self._launched is not None:
                    stop_warm()  # the launcher is there, which alone needed it
            if message is not None:
                self._listener.hear(message)
            self._give_sign(every_s)
        if self._line is not None:
            self._line.close()

    def _note(self, message: Any, passed_s: float, timeout_s: float) -> None:
        """Raises EOFError once the launcher has been silent for too long, and is killed."""
        self._silent_s += passed_s
        if message is not None:
            self._silent_s, self._heard = 0.0, True
        if self._silent_s <= (timeout_s if self._heard else LAUNCHER_S):
            return
        log.warning("the launcher has not answered for %.0f s: another one follows", self._silent_s)
        assert self._order is not None
        if (silent := read_note(Path(self._order.folder))) is not None:
            silent.kill()
        raise EOFError

    def _give_sign(self, every_s: float) -> None:
        now_s = time.monotonic()
        if now_s < self._sign_due_s:
            return
        self._sign_due_s = now_s + every_s
        trained, self.trained = self.trained, False
        self.ask(orders.ControllerLives(trained))

    def _is_followed(self) -> bool:
        """Whether a keeper has started a launcher, while this process stood still: that one has a
        controller of its own, and listens where ours did."""
        if self._launched is None:
            return False
        folder = Path(self._launched.folder)
        if answers(folder, 0.0) is None:
            return False
        time.sleep(AGAIN_S)  # it may have been ours, just ending
        return answers(folder, 0.0) is not None

    def _replace_launcher(self) -> None:
        is_followed = self._is_followed()
        with self._changed:
            if is_followed:
                log.warning("another launcher and controller have this run")
                self._departed = True
            if self._departed or self._order is None:
                return
            if self._line is not None:
                self._line.close()
            self._line = None
            self._in_vain += 1
            if self._in_vain > LAUNCHERS_MAX:
                self._departed = True
        if self._departed:
            self._listener.gave_up(f"{LAUNCHERS_MAX} launchers of processes ended at once")
            return
        known, nodes = self._listener.known()
        unborn = {one.name for one in known if not one.pid}
        try:
            line = self._launch(self._order_of(known, nodes))
        except OSError as error:
            log.warning("no launcher of processes can be started: %s", error)
            time.sleep(AGAIN_S)
            return
        with self._changed:
            self._line = line
            unborn |= self._unsent  # what was asked for meanwhile, too
            self._unsent.clear()
            self._changed.notify_all()
        for forked in self._listener.known()[0]:
            if forked.name in unborn and not forked.ended:
                self._listener.lost_unborn(forked)

    def _order_of(self, known: tuple[orders.Forked, ...], nodes: dict[str, Any]) -> orders.Order:
        """For the launcher that takes over whom this process knows: no name is used again."""
        assert self._order is not None
        forked = [one if one.pid else replace(one, ended=True) for one in known]
        in_charge = ""
        if self._launched is not None:
            in_charge, pid = f"controller of process {os.getpid()}", os.getpid()
            forked.append(orders.Forked(in_charge, "controller", "", pid, orders.ticks_of(pid)))
        return replace(self._order, forked=tuple(forked), nodes=nodes, in_charge=in_charge)
