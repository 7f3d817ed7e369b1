"""What `import elastic_ft` offers: a change here is a change for users."""

from __future__ import annotations

import subprocess
import sys

import pytest

import elastic_ft

NAMES = [
    "CheckpointReader",
    "Client",
    "Context",
    "ElasticError",
    "ElasticTrainer",
    "Job",
    "JobFailed",
    "Step",
    "UsageError",
    "init",
    "load_job",
    "parse_job",
    "run_local",
    "train",
]


def test_the_exported_names() -> None:
    assert elastic_ft.__all__ == NAMES
    assert set(NAMES) <= set(dir(elastic_ft))


@pytest.mark.parametrize("name", NAMES)
def test_an_exported_name_is_what_it_says(name: str) -> None:
    assert getattr(elastic_ft, name).__name__ == name


def test_other_names_are_unknown() -> None:
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = elastic_ft.trian


def test_the_package_itself_is_light() -> None:
    program = "import sys, elastic_ft.core; print(*{'torch', 'ray', 'pydantic'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=True
    )
    assert done.stdout.strip() == ""
