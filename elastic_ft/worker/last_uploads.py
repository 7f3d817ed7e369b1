"""The end of a loop: what is being written is waited for, and so is a store that is away."""

from __future__ import annotations

from elastic_ft.errors import GroupBroken
from elastic_ft.groups.groups import Groups
from elastic_ft.worker.tools import Flags, Tools

UPLOAD_POLL_S = 0.1


def is_called_off(groups: Groups, flags: Flags) -> bool:
    """Somebody waits for this worker: a store that is away is not waited for."""
    return bool(groups.aborted) or flags.pause or flags.stop


def await_uploads(tools: Tools, groups: Groups, flags: Flags) -> bool:
    """Returns whether they have ended, each by its own deadline; False if a pause came first.

    Raises GroupBroken.
    """
    while not tools.checkpointer.wait_all(UPLOAD_POLL_S):
        tools.points("finishing")  # an upload takes as long as it takes: this is no hang
        if groups.aborted:
            raise GroupBroken(groups.aborted)
        if flags.pause:
            return False
    return True
