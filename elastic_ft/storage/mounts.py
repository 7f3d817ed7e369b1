"""Which paths lie on a file system that can hang: a server's, or one that the user names.

A call into such a file system may not come back for hours, nor be interrupted, so nothing is asked
of it here: its type comes from the kernel's table of mounts, and a link on the way to a path is
read only where its own folder lies on a disk of this machine.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
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
ROOT = Path("/")
_OCTAL = re.compile(r"\\([0-7]{3})")

MountTable = Mapping[Path, bool]  # by mount point, whether it can hang


def plain_path(url: str) -> Path | None:
    """The folder of a path or file:// URL, wherever that lies; None for any other URL."""
    if "://" in url and not url.startswith("file://"):
        return None
    return Path(url.removeprefix("file://")).absolute()


def can_hang(path: Path) -> bool:
    """Whether it lies on such a file system, links followed. Nothing is asked of one."""
    table = _table()
    here, rest = ROOT, list(path.absolute().parts[1:])
    for _ in range(STEPS_MAX):
        if _is_in_one(here, table):
            return True
        if not rest:
            return False
        name = rest.pop(0)
        below = here.parent if name == ".." else here / name
        target = None if _is_in_one(below, table) else _link_at(below)
        if target is None:
            here = below
        elif target.is_absolute():
            here, rest = ROOT, [*target.parts[1:], *rest]
        else:
            rest = [*target.parts, *rest]
    return False


def _table() -> MountTable:
    """The newest mount at a place hides others. Where the root itself comes from a server nothing
    could go on without it, Python neither: it counts as a disk of the machine."""
    try:
        lines = MOUNTS.read_text(errors="surrogateescape").splitlines()
    except OSError:  # another system than Linux: what is named counts
        lines = []
    table = {ROOT: False}
    for line in lines:
        _, point, kind, *_ = line.split(" ")
        table[Path(_decoded(point))] = _is_of_a_server(kind) and point != str(ROOT)
    named = filter(None, os.environ.get(NAMED, "").split(":"))
    return table | dict.fromkeys(map(Path, named), True)


def _is_of_a_server(kind: str) -> bool:
    return kind.partition(".")[0] in OF_SERVERS and kind not in OF_THIS_MACHINE


def _decoded(point: str) -> str:
    """The kernel writes blanks and such as octal numbers."""
    return _OCTAL.sub(lambda found: chr(int(found[1], 8)), point)


def _is_in_one(path: Path, table: MountTable) -> bool:
    while path not in table:
        path = path.parent
    return table[path]


def _link_at(path: Path) -> Path | None:
    try:
        return path.readlink()
    except OSError:  # no link, or not there yet
        return None
