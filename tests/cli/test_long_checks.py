"""Who waits for a check is told that it goes on, and of what; and what has ended it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic_ft.cli import progress
from elastic_ft.cli.last_words import why_ended
from elastic_ft.cli.progress import saying_if_long


def test_what_takes_long_is_told_again_and_again_until_it_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    told_thrice = threading.Event()

    def say(text: str) -> None:
        said.append(text)
        if len(said) == 3:
            told_thrice.set()

    monkeypatch.setattr(progress, "say", say)
    with saying_if_long("model.path own:make", first_s=0.05):
        assert told_thrice.wait(60), said
    assert said[:3] == [f"model.path own:make: {s} s so far" for s in ("0.05", "0.1", "0.2")]


def test_what_is_over_soon_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(progress, "say", said.append)
    before = {thread.ident for thread in threading.enumerate()}
    with saying_if_long("model.path own:make", first_s=60.0):
        pass
    for thread in threading.enumerate():
        if thread.ident not in before:
            thread.join(60)  # it does not wait for its time
            assert not thread.is_alive()
    assert said == []


def ended_in(lines: str) -> tuple[int, str]:
    """How a process with ``lines`` of the user's ended, and what it told."""
    code = "from elastic_ft.cli.last_words import witnessed\nimport ctypes, os, signal, sys\n"
    code += f"with witnessed('model m:make'):\n    {lines}\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("lines", "code", "told"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, "from outside (SIGKILL), or by"),
        ("os.abort()", -signal.SIGABRT, "by SIGABRT (aborted) in "),
        ("os._exit(0)", 0, "from outside (SIGKILL), or by os._exit"),
        ("sys.exit(3)", 3, ""),
        ("os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT, ""),
    ],
)
def test_what_ends_a_process_that_makes_a_model_is_told_in_a_line(
    lines: str, code: int, told: str
) -> None:
    """It ended without a word."""
    found, err = ended_in(lines)
    assert found == code
    if told:
        assert err.count("\n") == 1, err
        assert err.startswith(f"elastic-ft: model m:make: this process was ended {told}"), err
    else:
        assert "was ended" not in err


def test_memory_that_ran_out_is_named() -> None:
    assert why_ended("", 1) == "by SIGKILL: memory ran out"


def test_a_model_that_breaks_down_is_named_with_the_line_that_does(
    write_job: Callable[..., str], folder: Path
) -> None:
    """``elastic-ft check`` ended with 139, and said nothing."""
    (folder / "broken.py").write_text(
        "import ctypes\n\ndef make(**kwargs):\n    return ctypes.string_at(0)\n"
    )
    job = write_job({"model": {"path": "broken:make"}})
    command = [sys.executable, "-m", "elastic_ft.cli", "check", job, "--processes"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGSEGV
    assert done.stderr == (
        "elastic-ft: model and data are made, to check them (model.path broken:make): "
        f"this process was ended by SIGSEGV (segmentation fault) in {folder}/broken.py:4 make\n"
    )
