"""The controller's tables: nothing that can be asked for, or said, is without its function."""

from __future__ import annotations

import subprocess
import sys
import typing

from elastic_ft.controller.executor import EXECUTORS
from elastic_ft.controller.hearing import HANDLERS, LISTENERS
from elastic_ft.core import commands as cmd
from elastic_ft.core import events as ev
from elastic_ft.transport.control import TO_CONTROLLER, Hello


def test_every_command_of_the_core_is_executed() -> None:
    assert EXECUTORS.keys() == set(typing.get_args(cmd.Command))


def test_every_event_of_the_core_is_handled() -> None:
    assert HANDLERS.keys() > set(typing.get_args(ev.Event))


def test_whatever_a_worker_may_say_is_heard() -> None:
    events = set(typing.get_args(ev.Event))
    said = {kind for kind in TO_CONTROLLER._kinds.values() if kind is not Hello}
    assert said - events == LISTENERS.keys()


def test_a_controller_starts_workers_before_it_imports_torch() -> None:
    """Which takes seconds; they import it at the same time."""
    program = "import sys, elastic_ft.controller.controller, elastic_ft.hosts.local"
    check = "assert 'torch' not in sys.modules, 'torch'"
    subprocess.run([sys.executable, "-c", f"{program}\n{check}"], check=True, timeout=240)
