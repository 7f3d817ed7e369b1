"""How long the parts of this process's start took (``observe.startup`` adds them up).

Of what is ours a host imports this first: the time from here on is spent on importing the rest. A
process from which workers fork imports for all of them: what it took is part of theirs, and how
long they were not wanted yet is not.
"""

import time

_since_s = time.monotonic()
_spent: dict[str, float] = {}


def passed(part: str) -> None:
    """``part`` is over, which began when the one before it was."""
    global _since_s
    now_s = time.monotonic()
    _spent[part] = round(_spent.get(part, 0.0) + now_s - _since_s, 3)
    _since_s = now_s


def forked() -> None:
    """In a process that was forked from one that had imported: its own time begins now."""
    global _since_s
    _since_s = time.monotonic()


def begin_again() -> None:
    """As ``forked``, where what was imported took nobody's time."""
    forked()
    _spent.clear()


def spent() -> dict[str, float]:
    """Seconds by part: ``imports_s``, ``connect_s``."""
    return dict(_spent)
