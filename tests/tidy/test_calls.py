"""What runs too seldom to tell calls others as they want to be called: benchmarks, examples, chaos,
and tests that run on request alone."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ON_REQUEST = re.compile(r"\bmark\.(soak|bench|gpu|fuzz)\b")
BENCHMARKS = {path.stem: path.read_text() for path in (ROOT / "benchmarks").glob("*.py")}
IMPORTED = re.compile(r"^(?:from|import) (\w+)\s", re.MULTILINE)
RARE = [
    *(ROOT / folder for folder in ("benchmarks", "examples", "chaos")),
    *(p for p in sorted((ROOT / "tests").rglob("*.py")) if ON_REQUEST.search(p.read_text())),
]
# Types of values are not looked at: where nobody writes them down, mypy guesses.
CODES = re.compile(r"\[(call-arg|name-defined|attr-defined|return-value)\]$")
# These are not looked into, which would take a minute. ``Any`` is what comes of them.
LARGE = "accelerate aiohttp deepspeed fsspec lightning numpy pyarrow ray rich torch torchao"
LARGE += " torchft transformers trl"
SETTINGS = """
[mypy]
plugins = pydantic.mypy
explicit_package_bases = true
implicit_reexport = true
check_untyped_defs = true
ignore_missing_imports = true
follow_imports = silent
mypy_path = {shims}
[mypy-{large}]
follow_imports = skip
"""


def found_in(folder: Path, *paths: Path) -> list[str]:
    """What mypy finds in these, and in what they hold. ``folder``: for what it needs."""
    # Some import others as what lies beside them.
    beside = {name for text in BENCHMARKS.values() for name in IMPORTED.findall(text)}
    for name in beside & BENCHMARKS.keys():
        (folder / f"{name}.py").write_text(f"from benchmarks.{name} import *\n")
    large = ",".join(f"{name}.*" for name in LARGE.split())
    settings = folder / "mypy.ini"
    settings.write_text(SETTINGS.format(large=large, shims=folder))
    options = ["--config-file", str(settings), "--cache-dir", str(folder / "cache")]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, *map(str, paths)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr  # else it has looked at nothing
    return [line for line in done.stdout.splitlines() if CODES.search(line)]


# What a benchmark did until this was looked at, a name that has gone, and a write of what the state
# of the core does not have.
WRONG = """import ranks
from elastic_ft.core.state import Turn
from elastic_ft.state.checkpointer import Checkpointer
def write(of: Checkpointer, shard, owned, state, groups):
    of.write(shard, owned, state, groups)
    ranks.gone()
def change(turn: Turn):
    turn.set(phase='running', committed=1)
    turn.set(step=1)
"""


def test_what_is_called_takes_that(tmp_path: Path) -> None:
    """And what is wrong would be seen, in the same look."""
    wrong = tmp_path / "wrong_calls.py"
    wrong.write_text(WRONG)
    found = found_in(tmp_path, wrong, *RARE)
    seen = [line for line in found if f"{wrong.name}:" in line]
    codes = [CODES.search(line).group(1) for line in seen]  # type: ignore[union-attr]
    assert codes == ["call-arg", "attr-defined", "call-arg"]
    assert [line for line in found if line not in seen] == []
