"""Files of a run folder, written whole or not at all, and lines that any reader understands."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from elastic_ft.core.typed import fields_of
from elastic_ft.observe.run_reader import read_lines
from elastic_ft.storage.local_files import is_private

ASIDE_MAX = 4  # older versions of a file whose steps were voided


class Stamp(NamedTuple):
    """What tells a file from what it was before."""

    changed_ns: int
    size: int
    inode: int
    replaced: int  # how often its beginning was


def stamp_of(status: os.stat_result, replaced: int = 0) -> Stamp:
    return Stamp(status.st_mtime_ns, status.st_size, status.st_ino, replaced)


def set_aside(path: Path) -> None:
    """Copies a file to ``name.<n>.jsonl`` beside it, n counting up, and drops old copies."""
    numbered = {
        int(old.suffixes[-2][1:]): old
        for old in path.parent.glob(f"{path.stem}.*{path.suffix}")
        if old.suffixes[-2][1:].isdecimal()
    }
    number = max(numbered, default=0) + 1
    shutil.copyfile(path, path.with_suffix(f".{number}{path.suffix}"))
    for old in sorted(numbered)[: max(0, len(numbered) + 1 - ASIDE_MAX)]:
        numbered[old].unlink()


def replace(path: Path, content: bytes, check: Callable[[], object] = lambda: None) -> None:
    """Whole or not at all, also where the power fails. ``check``: last of all, may raise."""
    swap = path.with_suffix(".tmp")
    swap.unlink(missing_ok=True)
    with open(swap, "wb", opener=opener(path.name)) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    check()
    swap.replace(path)


def opener(name: str) -> Callable[[str, int], int]:
    """What is nobody else's business is readable by the owner alone."""
    mode = 0o600 if is_private(name) else 0o666
    return lambda path, flags: os.open(path, flags, mode)


def sync(path: Path) -> None:
    """The file's content, or the folder's entries, are on the disk from now on."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def line_of(values: dict[str, Any]) -> str:
    """One line of JSON, which has no NaN and no infinities: they are null. Data classes are their
    fields by name."""
    try:
        return json.dumps(values, default=fields_of, allow_nan=False) + "\n"
    except ValueError:
        return json.dumps(finite(values), allow_nan=False) + "\n"


def finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return finite(fields_of(value)) if is_dataclass(value) else value


def open_to_append(path: Path) -> BinaryIO:
    return open(path, "ab", buffering=0, opener=opener(path.name))


def drop_torn_line(path: Path, check: Callable[[], object]) -> bool:
    """Returns whether the file had one, left by a controller that died writing.

    ``check``: as of ``replace``.
    """
    content = path.read_bytes() if path.exists() else b""
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        replace(path, whole, check)
    return whole != content


def void_after(path: Path, step: int, check: Callable[[], object]) -> None:
    """Only lines of steps up to ``step`` stay; where others go, the whole file stays beside it.

    ``check``: as of ``replace``.
    """
    lines = read_lines(path)
    kept = [line for line in lines if line["step"] <= step]
    if len(kept) < len(lines):
        set_aside(path)
    replace(path, "".join(line_of(line) for line in kept).encode(), check)
