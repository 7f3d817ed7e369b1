"""Named points of a step, and faults injected there by real signals. Off unless a job asks.

A point is where something can die: data, forward, backward, reduce, before_optimizer,
inside_optimizer, after_optimizer, snapshot_copy, buddy_send, forming, connecting (between a
generation's first group and its others), resharding, checkpoint_shard, before_manifest, finishing
(after the last step). Reaching one is also how a worker shows progress.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from elastic_ft.errors import UsageError

POINTS = (
    "data",
    "forward",
    "backward",
    "reduce",
    "before_optimizer",
    "inside_optimizer",
    "after_optimizer",
    "snapshot_copy",
    "buddy_send",
    "forming",
    "connecting",
    "resharding",
    "checkpoint_shard",
    "before_manifest",
    "finishing",
)
Interrupting = Callable[[str], contextlib.AbstractContextManager[None]]
OPERATIONS_BEFORE_INTERRUPT = 3  # of the optimizer: enough to leave it half done


class InjectedFault(RuntimeError):
    """Raised in a worker by a fault whose action is "raise"."""


class InjectedUsageError(UsageError):
    """Raised by "raise_usage": what no retry can cure."""


Action = Literal[
    "kill",
    "abort",
    "oom",
    "stop",
    "hang",
    "slow",
    "raise",
    "raise_usage",
    "nan",
    "corrupt",
    "corrupt_own",
    "gpu_assert",
    "gpu_oom",
    "gpu_hang",
]
ON_GPU = ("gpu_assert", "gpu_oom", "gpu_hang")  # need one


@dataclass(frozen=True, slots=True)
class PointFault:
    """One fault: who, where, what. It fires once in a run.

    ``rank`` or ``worker`` selects the victim; ``step``, ``generation``, the ``world`` size and
    ``after`` (the index of a fault that fired in an earlier generation) narrow the moment.

    kill, abort, oom: the process ends, by SIGKILL, by SIGABRT, by the kernel as memory runs out.
    stop, hang: it stands still, whole or in this thread. slow: it waits ``lasts_s`` here.
    raise, raise_usage: as user code's exceptions; the second is one that no retry can cure.
    gpu_assert, gpu_oom: the GPU fails as by an index out of range, by memory that is out.
    gpu_hang: a kernel of it never ends.
    nan: the next forward pass yields NaN. corrupt flips a byte in every copy that the victim keeps
    for a peer, corrupt_own in every snapshot of its own. After slow, nan and these it goes on.
    """

    point: str
    action: Action = "kill"
    rank: int | None = None
    worker: str | None = None
    step: int | None = None
    generation: int | None = None
    world: int | None = None
    after: int | None = None
    lasts_s: float = 0.0

    def __post_init__(self) -> None:
        if self.point not in POINTS:
            raise ValueError(f"unknown point {self.point!r}, expected one of {', '.join(POINTS)}")


def unknown() -> int:
    """What is said of layers left where nobody counts them."""
    return -1


class Points:
    """Announces points: keeps the progress mark, and fires what is armed."""

    def __init__(self, worker: str, faults: tuple[PointFault, ...], fired: Callable[[int], None]):
        self.worker, self.rank, self.step, self.generation = worker, -1, 0, 0
        self.world = 0
        self.corrupt: Callable[[bool], None] = lambda own: None  # what the actions so named do
        self.place = 0  # points the training thread reached since the step began
        self.count, self.last = 0, "starting"
        self.layers_left: Callable[[], int] = unknown  # of the step, for the device: see Mark
        # Monotonic: since when the script's own code runs between two steps; 0: it does not.
        self.outside_since_s = 0.0
        self._faults, self._fired, self._spent = faults, fired, set[int]()
        self._before = frozenset[int]()  # fired in earlier generations

    def __call__(self, point: str, step: int | None = None) -> None:
        """``step``: given by background work, and where a point is reached again within a step:
        that is progress, but no place by which ranks can be compared."""
        self.count += 1
        if step is None:
            self.place += 1
            self.last = point
        if self._faults:
            for index in self._armed(point, self.step if step is None else step):
                self._fire(index)

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """The script's own code runs between two steps."""
        self.outside_since_s = time.monotonic()
        try:
            yield
        finally:
            self.outside_since_s = 0.0

    def begin(self, step: int) -> None:
        """The training thread begins ``step``."""
        self.step, self.place = step, 0

    def enter(
        self, generation: int, rank: int | None, world: int, step: int, fired: frozenset[int]
    ) -> None:
        """The training thread enters a generation; ``fired``: faults of this run that have."""
        self.generation, self.rank, self.world = generation, -1 if rank is None else rank, world
        self.begin(step)
        self._before, self._spent = fired, self._spent | fired

    def _armed(self, point: str, step: int) -> list[int]:
        return [
            index
            for index, fault in enumerate(self._faults)
            if index not in self._spent
            and fault.point == point
            and fault.rank in (None, self.rank)
            and fault.worker in (None, self.worker)
            and fault.step in (None, step)
            and fault.generation in (None, self.generation)
            and fault.world in (None, self.world)
            and (fault.after is None or fault.after in self._before)
        ]

    def _fire(self, index: int) -> None:
        fault = self._faults[index]
        self._spent.add(index)
        self._fired(index)  # told before it happens: a dead worker tells nothing
        ACTS[fault.action](self, fault)

    @property
    def interrupt_operations(self) -> Interrupting | None:
        """Fires a point between tensor operations; None while nothing is armed for that."""
        armed = self._faults and self._armed("inside_optimizer", self.step)
        return self._interrupting if armed else None

    @contextlib.contextmanager
    def _interrupting(self, point: str) -> Iterator[None]:
        from elastic_ft.torch_private import after_operations  # a keeper does without torch

        with after_operations(OPERATIONS_BEFORE_INTERRUPT, lambda: self(point)):
            yield


# ----------------------------------------------------------------------- what each does


def _raise(points: Points, fault: PointFault) -> None:
    error = InjectedUsageError if fault.action == "raise_usage" else InjectedFault
    raise error(f"injected at {fault.point} of step {points.step}")


def _stop(points: Points, fault: PointFault) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.2)  # it takes a moment to reach this thread; then this goes on if let


def _hang(points: Points, fault: PointFault) -> None:
    while True:
        time.sleep(3600)


def _nan(points: Points, fault: PointFault) -> None:
    from elastic_ft.torch_private import spoil_next_output

    spoil_next_output(float("nan"))


def _with_gpu() -> Any:
    """torch. Raises InjectedUsageError where it sees no GPU."""
    import torch  # a keeper does without

    if not torch.cuda.is_available():
        raise InjectedUsageError("a fault of a GPU needs a GPU, and this worker sees none")
    return torch


def _fail_an_assert(points: Points, fault: PointFault) -> None:
    """Raises AcceleratorError: a kernel has read beyond the end, and the context is lost."""
    torch = _with_gpu()
    torch.zeros(1, device="cuda")[torch.ones(1, dtype=torch.int64, device="cuda")]
    torch.cuda.synchronize()


def _run_out_of_device_memory(points: Points, fault: PointFault) -> None:
    """Raises OutOfMemoryError once this process has all that is left; then it is free again."""
    torch, hoard = _with_gpu(), []
    while True:
        hoard.append(torch.empty(1 << 28, dtype=torch.uint8, device="cuda"))


def _queue_a_kernel_without_end(points: Points, fault: PointFault) -> None:
    _with_gpu()
    from elastic_ft.torch_private import queue_a_kernel_without_end

    queue_a_kernel_without_end()


ACTS: dict[Action, Callable[[Points, PointFault], object]] = {
    "kill": lambda points, fault: os.kill(os.getpid(), signal.SIGKILL),
    "abort": lambda points, fault: os.abort(),
    "oom": lambda points, fault: run_out_of_memory(),
    "stop": _stop,
    "hang": _hang,
    "slow": lambda points, fault: time.sleep(fault.lasts_s),
    "raise": _raise,
    "raise_usage": _raise,
    "nan": _nan,
    "corrupt": lambda points, fault: points.corrupt(False),
    "corrupt_own": lambda points, fault: points.corrupt(True),
    "gpu_assert": _fail_an_assert,
    "gpu_oom": _run_out_of_device_memory,
    "gpu_hang": _queue_a_kernel_without_end,
}


# ------------------------------------------------------------------------ out of memory

MEMORY_CGROUPS = Path("/sys/fs/cgroup/memory")  # of cgroup v1, writable for root
OOM_CGROUP = "elastic_ft_oom_"  # and the process's id; whoever ran the job may remove it
OOM_LIMIT_BYTES = 256 << 20  # what is allocated at most, on top of what there is


def oom_cgroup() -> Path | None:
    """Where this process may make a memory cgroup of its own; None if nowhere."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    own = next((line.split(":")[2] for line in lines if ":memory:" in line), None)
    if own is None:
        return None
    parent = MEMORY_CGROUPS / own.strip("/")
    return parent if os.access(parent, os.W_OK) else None


def run_out_of_memory() -> None:
    """Allocates for real until the kernel kills this process, and only this one.

    In a memory cgroup of its own. Raises MemoryError where there can't be one: an address-space
    limit is all that is left, and what it does to a process is just that.
    """
    parent = oom_cgroup()
    if parent is not None:
        group = parent / f"{OOM_CGROUP}{os.getpid()}"
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(OOM_LIMIT_BYTES))
        (group / "cgroup.procs").write_text(str(os.getpid()))
    else:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + OOM_LIMIT_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    hoard = []
    for _ in range(2 * OOM_LIMIT_BYTES >> 20):
        hoard.append(bytearray(os.urandom(1 << 10)) * (1 << 10))
    raise MemoryError(f"{len(hoard)} MiB were to be had: no limit applies")


# (point, step=None): announces a named point, see faults. With the step: more of the same
# point, once per micro-batch, so that many of them are no hang.
Reach = Callable[..., None]
