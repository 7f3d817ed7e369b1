"""What broke a generation, as the controller is to hear of it: a peer, the state, the device, user
code."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from elastic_ft import errors
from elastic_ft.core import events as ev
from elastic_ft.core.assignment import Member
from elastic_ft.engines.loss_scale import NonFiniteGradient
from elastic_ft.faults import Points
from elastic_ft.worker.devices import can_be_used, is_lost, is_out_of_memory, may_be_lost
from elastic_ft.worker.traces import user_frames

DEVICE_LOST = 76  # exit code of a worker whose GPU is of no use to it any more
GRACE_S = 1.0  # for the news of a lost peer, when a collective's error could also be the user's
OF_ONE_WORKER = (errors.DataDiffers, errors.ScriptDiffers, errors.DeviceSick)
GROUPS_SAY = ("gloo", "Connection closed by peer", "NCCL")


class Trouble:
    """Tells the controller what went wrong in a worker; ends the process if that was its device.

    Attributes:
        device: that the worker trains on, once it is known.
    """

    def __init__(
        self,
        member: Member,
        points: Points,
        send: Callable[[Any], object],
        is_over_within: Callable[[float], bool],
    ) -> None:
        """``is_over_within(seconds)``: waits for the news that the generation is over anyway."""
        self.device = torch.device("cpu")
        self._member, self._points, self._send = member, points, send
        self._is_over_within = is_over_within
        self._once_more_at: int | None = None  # the last step that was, see ``_is_devices``

    def explain(self, generation: int, error: BaseException, *, restored: bool) -> None:
        """Tells what broke this generation; ``restored``: its state was there by then."""
        worker, step = self._member.worker, self._points.step
        if self._is_devices(generation, error):
            return
        if not restored and isinstance(error, (errors.StateDamaged, errors.StateUnreadable)):
            self._send(_refusal(worker, generation, error))
        elif isinstance(error, errors.StateDamaged) or self._is_collective(error):
            text = errors.one_line(error)
            self._send(ev.CollectiveFailed(time.time(), worker, generation, step, text))
        else:
            self._send(self._raised(generation, error))

    def user_raised(self, error: BaseException, own: bool = False) -> None:
        """Tells of an exception that the user's train loop let through. ``own``: it makes steps
        itself, and a collective that broke between them is nobody's but its own."""
        if is_lost(self.device, error):
            self._leave_device(error)
        if own and self._is_groups(error):
            error = errors.UsageError(
                "a collective of the script's own broke between two steps, where nothing is tried "
                "again: put it into the function of @ctx.step, or use ctx.evaluate "
                f"({errors.one_line(error)})"
            )
        self._send(self._raised(self._points.generation, error))

    def device_failed(self, what: str) -> None:
        """The driver says so of the device, from a thread that waits for it. Ends this process."""
        self._leave_device(errors.DeviceSick(what))

    def _is_devices(self, generation: int, error: BaseException) -> bool:
        """Whether ``error`` is one of the device's after which this step is tried once more here.

        Ends this process if its device is of no more use: a GPU needs another process then.
        """
        if self.device.type != "cuda":
            return False
        if is_out_of_memory(error) and can_be_used(self.device):
            why = "out of device memory, once more with an empty cache"
        elif is_lost(self.device, error):
            self._leave_device(error)
        elif may_be_lost(error) and not self._is_over_within(GRACE_S):  # nor was it a peer's loss
            why = "the device answers, once more"
        else:
            return False
        step = self._points.step
        if self._once_more_at == step:
            self._leave_device(error)
        self._once_more_at = step
        text = f"{why}: {errors.one_line(error)}"
        worker = self._member.worker
        self._send(ev.CollectiveFailed(time.time(), worker, generation, step, text))
        return True

    def _leave_device(self, error: BaseException) -> NoReturn:
        """Nothing of this process's state can be read: who has copies goes on, the last word is
        that it was the device."""
        event = self._raised(self._points.generation, error)
        self._send(replace(event, usage=False, whose=ev.ITS_DEVICE))
        os._exit(DEVICE_LOST)

    def _is_collective(self, error: BaseException) -> bool:
        """Whether ``error`` comes from a broken group rather than from user code."""
        if self._is_groups(error):
            return True
        if not isinstance(error, RuntimeError):
            return False
        return self._is_over_within(GRACE_S)  # a plain RuntimeError: a peer's loss may explain it

    def _is_groups(self, error: BaseException) -> bool:
        if isinstance(error, (errors.GroupBroken, dist.DistError)):
            return True
        says = str(error)
        return isinstance(error, RuntimeError) and any(mark in says for mark in GROUPS_SAY)

    def _raised(self, generation: int, error: BaseException) -> ev.WorkerRaised:
        usage = isinstance(error, errors.UsageError)
        is_numbers = isinstance(error, NonFiniteGradient)  # no line of code is to blame
        said = str(error).encode(errors="backslashreplace").decode()  # a file's name may be no text
        said = errors.harmless(said)[:500]
        return ev.WorkerRaised(
            time.time(),
            self._member.worker,
            generation,
            self._points.step,
            f"{type(error).__name__}: {said}",
            usage,
            frames=() if usage or is_numbers else user_frames(error),
            node=self._member.node,
            whose=ev.ITS_OWN if isinstance(error, OF_ONE_WORKER) else "",
        )


def _refusal(
    worker: str, generation: int, error: errors.StateDamaged | errors.StateUnreadable
) -> ev.SourceRefused:
    """Of the source that this generation was to be restored from."""
    now_s, reason = time.time(), str(error)
    if isinstance(error, errors.StateDamaged):
        return ev.SourceRefused(now_s, worker, generation, error.holder, reason, error.shard)
    unread_by = error.unread_by
    return ev.SourceRefused(
        now_s, worker, generation, error.holder, reason, kind=ev.UNREACHABLE, unread_by=unread_by
    )
