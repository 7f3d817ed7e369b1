"""The end of a loop: what is being written is waited for, and so is a store that is away."""

from __future__ import annotations

import time

from elastic_ft.errors import GroupBroken
from elastic_ft.groups.groups import Groups
from elastic_ft.worker.agreement import sum_over_members
from elastic_ft.worker.tools import Flags, Tools

UPLOAD_POLL_S = 0.1


def is_called_off(groups: Groups, flags: Flags) -> bool:
    """Somebody waits for this worker: a store that is away is not waited for."""
    return bool(groups.aborted) or flags.pause or flags.stop


def await_uploads(tools: Tools, groups: Groups, flags: Flags) -> bool:
    """Returns whether they have ended, each by its own deadline; False if a pause came first.

    All members return the same, at once: a store may be away for some of them alone, and who went
    on would wait in a collective that the others never reach. Raises GroupBroken.
    """
    while True:
        ended = tools.checkpointer.wait_all(UPLOAD_POLL_S)
        tools.points("finishing")  # an upload takes as long as it takes: this is no hang
        if groups.aborted:
            raise GroupBroken(groups.aborted)
        told = [float(not ended), float(flags.pause)]
        writing, pausing = sum_over_members(told, groups.world_size)
        if not writing:
            return True
        if pausing:
            return False
        if ended:
            time.sleep(UPLOAD_POLL_S)
