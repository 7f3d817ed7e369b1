"""Which paths lie on a file system that can hang: a server's, or one that the user names.

A call into such a file system may not come back for hours, nor be interrupted, so nothing is asked
of it here: its type comes from the kernel's table of mounts, and a link on the way to a path is
read only where its own folder lies on a disk of this machine.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

NAMED = "ELASTIC_FT_HANGING_MOUNTS"  # paths, with ":" between them
MOUNTS = Path("/proc/self/mounts")
OF_SERVERS = (
    *("9p", "afs", "beegfs", "ceph", "cifs", "coda", "gfs2", "glusterfs", "gpfs", "lustre", "nfs"),
    *("nfs4", "ocfs2", "orangefs", "panfs", "pvfs2", "smb3", "smbfs", "wekafs"),
    *("fuse", "autofs"),  # of a program; what is mounted there once somebody looks
)
OF_THIS_MACHINE = ("fuse.fuse-overlayfs", "fuse.lxcfs")
STEPS_MAX = 255  # links may lead in circles
ROOT = "/"
_OCTAL = re.compile(r"\\([0-7]{3})")

MountTable = Mapping[str, bool]  # by mount point, whether it can hang


def plain_path(url: str) -> Path | None:
    """The folder of a path or file:// URL, wherever that lies; None for any other URL."""
    if "://" in url and not url.startswith("file://"):
        return None
    return Path(url.removeprefix("file://")).absolute()


def can_hang(path: Path) -> bool:
    """Whether it lies on such a file system, links followed. Nothing is asked of one."""
    table = _table()
    here, rest = ROOT, [*reversed(path.absolute().parts[1:])]
    for _ in range(STEPS_MAX):
        if table.get(here, False):  # no folder above it can, or this would have ended there
            return True
        if not rest:
            return False
        name = rest.pop()
        below = here.rpartition("/")[0] or ROOT if name == ".." else f"{here.rstrip('/')}/{name}"
        target = None if table.get(below, False) else _link_at(below)
        if target is None:
            here = below
        else:
            here = ROOT if target.startswith(ROOT) else here
            rest += [part for part in reversed(target.split("/")) if part not in ("", ".")]
    return False


def _table() -> MountTable:
    """As it is now."""
    try:
        text = MOUNTS.read_text(errors="surrogateescape")
    except OSError:  # another system than Linux: what is named counts
        text = ""
    return _parsed(text, os.environ.get(NAMED, ""))


@lru_cache(maxsize=2)  # it is asked for many times a second, and seldom changes
def _parsed(text: str, named: str) -> MountTable:
    """The newest mount at a place hides others. Where the root itself comes from a server nothing
    could go on without it, Python neither: it counts as a disk of the machine."""
    table = {ROOT: False}
    for line in text.splitlines():
        _, point, kind, *_ = line.split(" ")
        table[str(Path(_decoded(point)))] = _is_of_a_server(kind) and point != ROOT
    return table | {str(Path(path)): True for path in named.split(":") if path}


def _is_of_a_server(kind: str) -> bool:
    return kind.partition(".")[0] in OF_SERVERS and kind not in OF_THIS_MACHINE


def _decoded(point: str) -> str:
    """The kernel writes blanks and such as octal numbers."""
    return _OCTAL.sub(lambda found: chr(int(found[1], 8)), point)


def _link_at(path: str) -> str | None:
    try:
        return os.readlink(path)  # noqa: PTH115  # pathlib takes twice the time
    except OSError:  # no link, or not there yet
        return None
