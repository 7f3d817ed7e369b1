"""Places that are none: nothing is named, nothing is there, or nothing can be written there."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic_ft.cli.app import BAD_USAGE, run_command


@pytest.mark.parametrize("tail", [[], ["--out"], ["--chaos"]], ids=["RUN", "out", "chaos"])
def test_an_empty_argument_names_nothing(
    write_job: Callable[..., str], capfd: pytest.CaptureFixture[str], tail: list[str]
) -> None:
    """A variable of the shell's that is not set: `resume ""` spoke of the folder /."""
    on_runs = [
        "resume",
        "attach",
        "stop",
        "events",
        "report",
        "replay",
        "tensorboard",
        "wandb",
        "mlflow",
    ]
    on_runs += ["tensorboard", "wandb", "mlflow"]
    groups = [["checkpoint", "ls"], ["checkpoint", "diff"], ["chaos", "check"]]
    jobs = [["status"], ["logs"], ["resize", "--workers", "2"]]
    places = [*([name] for name in on_runs), *jobs, *groups]
    for command in [["run", write_job(), "--processes", *tail]] if tail else places:
        assert run_command([*command, ""]) == BAD_USAGE
        out, err = capfd.readouterr()
        assert out == "" and err.count("\n") == 1
        assert re.fullmatch(
            r"elastic-ft: Invalid value for '(RUN|ID|URL|URL_A|--out|--chaos)': expected a path, "
            r"a URL or a name, found nothing \(see elastic-ft --help\)\n",
            err,
        ), (command, err)


def test_no_cluster_is_started_for_certificates_that_are_not_there(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It was, for 40 s, and then ended."""
    files = ["--tls-cert", "cert.pem", "--tls-key", "key.pem"]
    options = ["--local-nodes", "1", "--port", "0", "--folder", str(folder / "service")]
    assert run_command(["service", "start", *options, *files]) == BAD_USAGE
    why = "cert.pem, key.pem: No such file or directory"
    assert capfd.readouterr() == ("", f"elastic-ft: --tls-cert, --tls-key: {why}\n")


def test_a_log_that_cannot_be_written_is_refused(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "events.jsonl").write_text("")
    for out, why in (("/proc/nowhere", "No such file or directory"), ("job.yaml/x", "Not a direc")):
        (folder / "job.yaml").write_text("")
        assert run_command(["tensorboard", str(folder), "--out", out]) == BAD_USAGE
        said, err = capfd.readouterr()
        assert (said, err.count("\n")) == ("", 1)
        assert (
            err.startswith("elastic-ft: tensorboard: ")
            and f"{out}: cannot be written: {why}" in err
        )


def test_why_a_store_cannot_be_read_is_said_once(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was cut off in the middle, behind a class of Python's."""
    assert run_command(["resume", "odd://x"]) == BAD_USAGE
    err = capfd.readouterr().err
    assert err.count("odd://x") == 1 and "StorageError" not in err and "..." not in err
