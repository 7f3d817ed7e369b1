"""Numbers as reasons have them. Pure."""

from __future__ import annotations


def plural(workers: int) -> str:
    """Returns "1 worker", "2 workers"."""
    return f"{workers} worker{'s' * (workers != 1)}"


def are(workers: int, what: str) -> str:
    """Returns "1 worker is wanted", "2 workers are wanted"."""
    return f"{plural(workers)} {'is' if workers == 1 else 'are'} {what}"


def were(workers: int, what: str) -> str:
    return f"{plural(workers)} {'was' if workers == 1 else 'were'} {what}"
