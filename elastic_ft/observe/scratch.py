"""Temporary folders that a killed process leaves behind, removed by the next one that makes one.

Each has a file that names its process; those of processes that are gone, on this machine and by
this user, are removed. A folder without such a file is not ours to remove.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

OWNER = ".owner.json"


@dataclass(frozen=True, slots=True)
class ScratchOwner:
    host: str
    pid: int
    started_s: float  # of the process: another one may have its number by now

    @property
    def gone(self) -> bool:
        if self.host != os.uname().nodename:
            return False
        try:
            return abs(psutil.Process(self.pid).create_time() - self.started_s) > 1
        except psutil.NoSuchProcess:
            return True
        except psutil.AccessDenied:
            return False


def make(prefix: str, folder: str | None = None) -> Path:
    """A temporary folder of this process, in ``folder``; first the dead ones' of that prefix go."""
    parent = Path(folder or tempfile.gettempdir())
    for old in parent.glob(f"{prefix}*/{OWNER}"):
        if _is_left_behind(old):
            shutil.rmtree(old.parent, ignore_errors=True)
    made = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    claim(made)
    return made


def claim(folder: Path) -> None:
    """It is this process's from now on."""
    process = psutil.Process()
    owner = ScratchOwner(os.uname().nodename, process.pid, process.create_time())
    (folder / OWNER).write_text(json.dumps(asdict(owner)))


def _is_left_behind(path: Path) -> bool:
    try:
        return (
            path.stat().st_uid == os.getuid() and ScratchOwner(**json.loads(path.read_text())).gone
        )
    except (OSError, ValueError, TypeError):  # another process removes it just now, say
        return False
