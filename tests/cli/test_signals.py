"""SIGTERM ends a command as Ctrl-C does, whoever has started it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic_ft.cli.app import INTERRUPTED, run_command


@pytest.mark.parametrize("sigint", [signal.SIG_IGN, signal.SIG_DFL, signal.default_int_handler])
def test_sigterm_ends_a_command_that_follows(
    folder: Path, monkeypatch: pytest.MonkeyPatch, sigint: Callable[..., Any] | signal.Handlers
) -> None:
    """A shell without job control starts ``elastic-ft ... &`` with SIGINT ignored."""
    (folder / "events.jsonl").write_text("")
    signal.signal(signal.SIGINT, sigint)
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        assert len(looks) < 4, "it goes on after SIGTERM"
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(time, "sleep", sleep)
    assert run_command(["events", str(folder), "--follow"]) == INTERRUPTED
    assert len(looks) == 1


ENDS_SLOWLY = """
import atexit, sys
from elastic_ft.cli.app import main

@atexit.register
def slow():
    print("ending", flush=True)
    sys.stdin.readline()
    print("goes on")

main()
"""


def test_ctrl_c_while_the_process_ends_is_no_traceback() -> None:
    """Libraries have their own to do at the end: a second Ctrl-C, in there, showed a page of it."""
    command = [sys.executable, "-c", ENDS_SLOWLY, "--version"]
    pipes: dict[str, int] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, text=True, **pipes) as process:
        assert process.stdin and process.stdout and process.stderr
        assert process.stdout.readline().startswith("elastic-ft ")
        assert process.stdout.readline() == "ending\n"
        process.send_signal(signal.SIGINT)
        assert (process.stdout.read(), process.stderr.read()) == ("", "")
        assert process.wait(60) == 0
