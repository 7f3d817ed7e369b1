"""Deadlines that grow with the world and with what is to be moved. Pure.

What a job configures suits worlds of up to SUITED. In larger ones each worker adds a little: Gloo
connects everybody with everybody, NCCL's bootstrap goes round, an abort is heard by all.
"""

from __future__ import annotations

SUITED = 128  # workers
FORM_S_PER_WORKER = 0.05  # ncclCommInit alone takes up to a minute at some thousands
PAUSE_S_PER_WORKER = 0.005
READS_PER_FORMING = 3  # a silent store is found out before forming is given up
MEET_S = 10.0  # all meet within it: who does not is lost, and there is time for others to form
SAVE_BASE_S = 60.0  # for what a controller that ends leaves to keepers
UPLOAD_BASE_S = 600.0  # for a store that is away for a while
UPLOAD_BYTES_PER_S = 10e6  # slower than that is no upload


def form_s(form_timeout_s: float, workers: int) -> float:
    """For a generation to form and to get its state, while no byte of it comes."""
    return form_timeout_s + FORM_S_PER_WORKER * _beyond(workers)


def meet_s(form_timeout_s: float, workers: int) -> float:
    """For all to come to one point of forming, and to connect to each other."""
    return min(MEET_S, form_timeout_s) + FORM_S_PER_WORKER * _beyond(workers)


def pause_s(pause_timeout_s: float, workers: int) -> float:
    """For survivors to reach a safe point."""
    return pause_timeout_s + PAUSE_S_PER_WORKER * _beyond(workers)


def upload_s(nbytes: int, bytes_per_s_max: float | None) -> float:
    """For one worker's part of a checkpoint. ``bytes_per_s_max``: a cap that it is held to."""
    rate = UPLOAD_BYTES_PER_S
    if bytes_per_s_max is not None:
        rate = min(rate, bytes_per_s_max / 2)
    return UPLOAD_BASE_S + nbytes / rate


def save_s(nbytes: int, give_up_s: float) -> float:
    """For a keeper to save what no checkpoint has, ``nbytes`` in all; it gives up by itself, and
    that alone, after ``give_up_s``."""
    return max(SAVE_BASE_S, min(SAVE_BASE_S + nbytes / UPLOAD_BYTES_PER_S, give_up_s))


def _beyond(workers: int) -> int:
    return max(0, workers - SUITED)
