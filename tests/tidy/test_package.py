"""What is installed works without the repository: each file of the packages is in the wheel."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
FILES = [
    path
    for package in ("elastic_ft", "chaos")
    for path in (ROOT / package).rglob("*")
    if path.is_file() and "__pycache__" not in path.parts
]


def test_what_is_no_python_is_package_data() -> None:
    """`elastic-ft demo` was for checkouts alone: its job file was not in a package."""
    given = {
        path
        for package, patterns in SETUPTOOLS["package-data"].items()
        for pattern in patterns
        for path in ROOT.joinpath(*package.split(".")).glob(pattern)
    }
    others = {path for path in FILES if path.suffix != ".py"}
    assert len(others) > 40
    assert others - given == set()


def test_folders_of_modules_are_packages() -> None:
    """``packages.find`` passes over the others."""
    folders = {path.parent for path in FILES if path.suffix == ".py"}
    assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []
