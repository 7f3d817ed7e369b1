"""What a process does first that was forked from one which had imported."""

import sys


def draw_apart() -> None:
    """From numpy's global generator, which would draw the same in all of them; Python's own begins
    anew in each, and torch's is the same in any process."""
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
