"""The life of communicators, by the product's own groups; several ranks share the GPU.

killed: one rank dies in a collective. running: one is elsewhere, the others are broken off, as
they wait for a collective and as they enqueue more of them than their GPU takes.
generations: many, one after the other. init: one dies before the world's communicator is made, and
then one before others are split from it; those that are left go on.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import multiprocessing
import os
import signal
import statistics
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from elastic_ft import torch_private
from elastic_ft.config import parse_job
from elastic_ft.controller.host import WORKER_ENVIRONMENT
from elastic_ft.core.assignment import Assignment, Member, Source, Tier
from elastic_ft.core.layouts.layout import LayoutWish, plan_layout
from elastic_ft.core.shares import shares
from elastic_ft.errors import GroupBroken
from elastic_ft.groups.groups import Groups
from elastic_ft.worker import devices

LIMIT_S = 45.0
SOON_S = 1.0  # from the abort on, till who waited does no more
GENERATIONS = 30
NUMBERS = 1 << 18
QUEUED = 4096  # collectives: a GPU has about a thousand launches under way
BROKEN_OFF_S = 3.0  # after all have come to form
FILES_MORE, MIB_LESS = 10, 256  # after GENERATIONS: what is left of each shows


class Rank:
    def __init__(self, rank: int, options: SimpleNamespace, port: int) -> None:
        self.rank, self.options, self._port = rank, options, port
        self.device = torch.device(options.device, *([0] if options.device == "cuda" else []))
        self.last = rank == options.world - 1

    def form(self, generation: int, world: int) -> Groups:
        groups = self.groups(generation, world, self.options.hsdp and world == self.options.world)
        groups.form(self.device, 60)
        return groups

    def groups(self, generation: int, world: int, is_hsdp: bool) -> Groups:
        hsdp = LayoutWish(strategy="hsdp", shard_size=2)
        layout, _ = plan_layout(hsdp if is_hsdp else LayoutWish(strategy="fsdp"), world)
        members = tuple(Member(f"w{r}", f"n{r}", "localhost", 0) for r in range(world))
        source = Source(0, Tier.INITIAL)
        made = Assignment(generation, members, (), layout, source, ((),) * world, "kit")
        share, member = dict(shares(made))[f"w{self.rank}"], members[self.rank]
        return Groups(share, member, ("127.0.0.1", self._port))

    def reduce(self, group: Any = None, times: int = 1) -> float:
        numbers = torch.ones(NUMBERS, device=self.device)
        for _ in range(times):
            dist.all_reduce(numbers, group=group)
        return float(numbers.sum()) / NUMBERS

    def break_off(self, groups: Groups, after_s: float, times: int = 1) -> dict[str, Any]:
        """Collectives that one member never joins, aborted from another thread."""
        at_s: list[float] = []

        def cut() -> None:
            time.sleep(after_s)
            at_s.append(time.perf_counter())
            groups.abort("kit")

        threading.Thread(target=cut, daemon=True).start()
        group = groups.mesh.get_group(0) if self.options.hsdp and groups.mesh is not None else None
        try:
            found: dict[str, Any] = {"returned": self.reduce(group, times)}
        except Exception as error:
            found = {"raised": f"{type(error).__name__}: {str(error)[:80]}"}
        woken_s = time.perf_counter()
        groups.teardown()
        found["woken_s"] = round(woken_s - at_s[0], 3) if at_s else "before the abort"
        return found | {"teardown_s": round(time.perf_counter() - woken_s, 3)}

    def again(self, generation: int, world: int) -> dict[str, Any]:
        began = time.perf_counter()
        groups = self.form(generation, world)
        right = self.reduce() == world
        found = {"again_s": round(time.perf_counter() - began, 3), "right": right}
        groups.teardown()
        return found

    def killed(self) -> dict[str, Any]:
        groups = self.form(1, self.options.world)
        if self.last:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        return self.break_off(groups, 1.5) | self.again(2, self.options.world - 1)

    def running(self) -> dict[str, Any]:
        broken = []
        for generation, times in ((1, 1), (2, QUEUED)):
            groups = self.form(generation, self.options.world)
            if self.last:
                time.sleep(2.5)
                groups.teardown()
            else:
                broken.append(self.break_off(groups, 1.0, times))
        return {"broken": broken} | self.again(3, self.options.world)

    def generations(self) -> dict[str, Any]:
        times, free, files = [], [], []
        for generation in range(1, GENERATIONS + 1):
            marks = [time.perf_counter()]
            groups = self.form(generation, self.options.world)
            marks.append(time.perf_counter())
            self.reduce()
            marks.append(time.perf_counter())
            groups.teardown()
            marks.append(time.perf_counter())
            times.append([b - a for a, b in itertools.pairwise(marks)])
            if self.device.type == "cuda":
                free.append(torch.cuda.mem_get_info()[0] >> 20)
            files.append(len(list(Path("/proc/self/fd").iterdir())))
        medians = [round(statistics.median(column), 4) for column in zip(*times, strict=True)]
        found = dict(zip(("form_s", "use_s", "teardown_s"), medians, strict=True))
        return found | {"free_mib": free[::10], "files": files[::10]}

    def init(self) -> dict[str, Any]:
        broken = []
        for generation, is_hsdp in ((1, False), (2, True)):
            world = self.options.world + 1 - generation
            if self.rank == world - 1:  # Gloo's groups are made, NCCL's are not
                dist.ProcessGroup.split_group = die  # type: ignore[method-assign]
                if not is_hsdp:
                    torch._C._distributed_c10d.Backend.eager_connect_single_device = die
            broken.append(self.break_forming_off(self.groups(generation, world, is_hsdp)))
        return {"broken": broken} | self.again(3, self.options.world - 2)

    def break_forming_off(self, groups: Groups) -> dict[str, Any]:
        at_s: list[float] = []

        def cut() -> None:
            at_s.append(time.perf_counter())
            groups.abort("kit")

        def reach(point: str) -> None:
            if self.device.type == "cpu" and groups.rank == groups.world_size - 1:
                die()
            threading.Timer(BROKEN_OFF_S, cut).start()

        try:
            groups.form(self.device, 60, reach)
            found: dict[str, Any] = {"formed": True}
        except GroupBroken as error:
            found = {"why": str(error)[:120]}
        woken_s = time.perf_counter()
        groups.teardown()
        found["woken_s"] = round(woken_s - at_s[0], 3) if at_s else "before the abort"
        return found | {"teardown_s": round(time.perf_counter() - woken_s, 3)}


def die(*_: Any, **__: Any) -> Any:
    os._exit(9)


def serve(rank: int, options: SimpleNamespace, port: int, answers: Any) -> None:
    if options.device == "cuda":
        values = {"name": "kit", "steps": 1, "model": {"preset": "decoder-1m"}}
        devices.set_nccls_defaults()
        devices.set_up(parse_job(values | {"data": {"url": "stdlib:"}}))
    torch_private.forget_meshes()
    try:
        answers.put((rank, getattr(Rank(rank, options, port), options.mode)()))
    except BaseException as error:
        answers.put((rank, {"error": f"{type(error).__name__}: {str(error)[:200]}"}))
    time.sleep(1)  # the answer is on its way
    os._exit(0)


def why_failed(found: dict[int, Any], awaited: int) -> str:
    """What was not as it must be, or ""."""
    if len(found) < awaited:
        return f"{len(found)} of {awaited} ranks answered"
    for rank, answer in sorted(found.items()):
        files, free_mib = answer.get("files", [0]), answer.get("free_mib") or [0]
        broken = answer.get("broken", [])
        late = [b["woken_s"] for b in broken if isinstance(b["woken_s"], float)]
        for why, failed in (
            (answer.get("error"), "error" in answer),
            ("right: the sum is wrong", answer.get("right") is False),
            (f"broken: woken {late} s after the abort", max(late, default=0) > SOON_S),
            ("formed without who died", any("formed" in one for one in broken)),
            (f"files: {files} are open", files[-1] - files[0] > FILES_MORE),
            (f"free_mib: {free_mib}", free_mib[0] - free_mib[-1] > MIB_LESS),
        ):
            if failed:
                return f"rank {rank}: {why}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=("killed", "running", "generations", "init"))
    parser.add_argument("--world", type=int, default=4)
    parser.add_argument("--hsdp", action="store_true")
    parser.add_argument("--device", default="cuda")
    options = SimpleNamespace(**vars(parser.parse_args()))
    timeout = datetime.timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", 0, None, True, timeout, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    ranks = []
    for rank in range(options.world):
        shared = {"NCCL_HOSTID": f"kit{rank}"}  # NCCL refuses two ranks of a host on one GPU
        os.environ.update(WORKER_ENVIRONMENT | shared)
        process = context.Process(target=serve, args=(rank, options, store.port, answers))
        process.start()
        ranks.append(process)
    awaited = options.world - {"killed": 1, "init": 2}.get(options.mode, 0)
    found: dict[int, Any] = {}
    until_s = time.monotonic() + LIMIT_S
    while len(found) < awaited and time.monotonic() < until_s:
        with contextlib.suppress(Exception):  # none yet
            rank, answer = answers.get(timeout=1)
            found[rank] = answer
    for process in ranks:
        process.kill()
    line = {"mode": options.mode, "answered": f"{len(found)}/{awaited}", "ranks": found}
    why = why_failed(found, awaited)
    print(json.dumps({"failed": why} | line if why else line))
    return 1 if why else 0


if __name__ == "__main__":
    sys.exit(main())
