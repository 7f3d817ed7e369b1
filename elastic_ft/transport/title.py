"""What ``ps -e``, ``top`` and ``pgrep`` call a process of ours: which one is which."""

from __future__ import annotations

import contextlib
from pathlib import Path

SHOWN = 15  # characters, by Linux


def set_title(title: str) -> None:
    """Names this process; where there is no Linux /proc it keeps its name."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(title[:SHOWN])
