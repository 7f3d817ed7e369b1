"""Makes requirements*.txt, what the image installs, each archive by its hash.

    python deploy/lock.py

With the Python version of the image, on Linux x86-64: pip resolves the project's dependencies at
the versions of constraints.txt, downloads metadata alone, and tells the hash of each archive.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
WHEELS, SOURCES = (Path(__file__).parent / f"requirements{kind}.txt" for kind in ("", "-source"))
FROM_SOURCE = "deepspeed"  # it has no wheels
TORCH = re.compile(r"^torch==(\S+)$", re.MULTILINE)
HEADER = """\
# What the image installs: Linux x86-64, CPython {python}. Made by deploy/lock.py, do not edit.
# Local builds of torch (+cpu) are not these: pip install --require-hashes refuses them.
"""


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    torch = TORCH.search((ROOT / "constraints.txt").read_text())
    assert torch is not None, "constraints.txt pins torch"
    wanted = [name for name in project["dependencies"] if not name.startswith("torch")]
    found = resolve([*wanted, f"torch==={torch[1]}"])  # ===: no local build of this machine
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    found.sort(key=name_of)
    for target in (WHEELS, SOURCES):
        items = [item for item in found if (name_of(item) == FROM_SOURCE) == (target == SOURCES)]
        lines = [requirement(item) for item in items]
        target.write_text(HEADER.format(python=python) + "".join(lines))
        print(f"{len(lines)} archives in {target}")


def resolve(wanted: list[str]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
        command += ["--quiet", "--report", str(report), "-c", str(ROOT / "constraints.txt")]
        command += ["--only-binary=:all:", "--no-binary", FROM_SOURCE, "--no-build-isolation"]
        subprocess.run([*command, *wanted], check=True, timeout=1800)
        installs: list[dict[str, Any]] = json.loads(report.read_text())["install"]
    return installs


def name_of(item: dict[str, Any]) -> str:
    """As PEP 503 normalizes it."""
    return re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower()


def requirement(item: dict[str, Any]) -> str:
    digest = item["download_info"]["archive_info"]["hashes"]["sha256"]
    return f"{name_of(item)}=={item['metadata']['version']} \\\n    --hash=sha256:{digest}\n"


if __name__ == "__main__":
    main()
