"""Who is where in a run, and how large its world was when: a part of ``run_view``."""

from __future__ import annotations

from typing import Any

from elastic_ft.observe.lines import Line

WORLDS_MAX = 400
WORKERS_MAX = 256  # that are there, and as many that are gone
GONE = ("worker_lost", "worker_hung", "worker_refused", "device_lost", "straggler_evicted")


class WorldView:
    def __init__(self) -> None:
        self._worlds: list[list[Any]] = []  # x, world size, layout, generation
        self._there: dict[str, dict[str, Any]] = {}
        self._gone: list[dict[str, Any]] = []
        self._gone_left_out = 0
        self._formed: Line = {}

    def on(self, event: str, line: Line, x: float) -> None:
        if event == "job_started":
            self._leave(list(self._there), x, "its run ended")
            self._disband(line, x)
        elif event == "worker_ready":
            self._arrive(line["worker"], x).update(node=line["node"])
        elif event == "generation_formed":
            self._form(line, x)
        elif event in GONE:
            self._leave([line["worker"]], x, line["reason"])
        elif event == "suspended":
            self._disband(line, x)

    def _arrive(self, worker: str, x: float) -> dict[str, Any]:
        new = {"worker": worker, "rank": None, "node": "", "host": "", "pid": None}
        return self._there.setdefault(worker, {**new, "since_x": round(x, 3), "state": "ready"})

    def _form(self, line: Line, x: float) -> None:
        self._formed = line
        self._all_wait()
        for member in line["members"]:
            known = {key: member.get(key) for key in ("rank", "node", "host", "pid")}
            self._arrive(member["worker"], x).update(known, state="member")
        idle = {one["worker"]: one["reason"] for one in line["idle"]}
        for worker, reason in idle.items():
            self._arrive(worker, x)["state"] = f"idle: {reason}"
        members = {member["worker"] for member in line["members"]}
        self._leave([w for w in self._there if w not in members | idle.keys()], x, "released")
        self._grow(x, line["world_size"], line["layout"], line["generation"])

    def _disband(self, line: Line, x: float) -> None:
        """Until the next generation forms, nobody trains."""
        if self._formed:
            self._formed = self._formed | {"world_size": 0, "layout": ""}
            self._all_wait()
            self._grow(x, 0, "", line["generation"])

    def _all_wait(self) -> None:
        for seat in self._there.values():
            seat["rank"], seat["state"] = None, "ready"

    def _leave(self, workers: list[str], x: float, why: str) -> None:
        for worker in workers:
            seat = self._there.pop(worker, None)
            if seat is None:
                continue
            self._gone.append({**seat, "left_x": round(x, 3), "state": why})
            if len(self._gone) > WORKERS_MAX:
                del self._gone[0]
                self._gone_left_out += 1

    def _grow(self, x: float, world: int, layout: str, generation: int) -> None:
        if len(self._worlds) == WORLDS_MAX:  # what lasted shortest is seen least
            spans = [b[0] - a[0] for a, b in zip(self._worlds, self._worlds[1:], strict=False)]
            del self._worlds[1 + spans[1:].index(min(spans[1:]))]
        self._worlds.append([round(x, 3), world, layout, generation])

    def as_json(self) -> dict[str, Any]:
        there = sorted(self._there.values(), key=lambda s: (s["rank"] is None, s["rank"] or 0))
        return {
            "world": self._formed.get("world_size", 0),
            "layout": self._formed.get("layout", ""),
            "generation": self._formed.get("generation", 0),
            "wanted": self._formed.get("wanted"),
            "worlds": self._worlds,
            "workers": there[:WORKERS_MAX],
            "workers_left_out": max(0, len(there) - WORKERS_MAX),
            "gone": self._gone,
            "gone_left_out": self._gone_left_out,
        }
