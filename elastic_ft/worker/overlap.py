"""What a step's computing waits for, and what is under way behind it: every so many steps.

*Exposed* is time in which the training thread does nothing but wait for a collective or a snapshot,
slower ranks included; *hidden* is what goes on meanwhile it computes. On GPUs nothing is measured:
their threads run ahead, and it is streams that wait.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from elastic_ft.core.layouts.calibration import on_links
from elastic_ft.core.layouts.layout import Layout
from elastic_ft.groups.waits import EVERY_STEPS, WAITS, SecondsByKind
from elastic_ft.state.snapshot import Snapshots
from elastic_ft.torch_private import FUNCTIONAL
from elastic_ft.worker.spent import Spent

FIRST = 3  # step of a generation: by then nothing is set up any more
CHANGED = 0.1  # of a step's time: told again


class Overlap:
    """Of one generation, as one rank has it."""

    def __init__(self, snapshots: Snapshots, device: torch.device, layout: Layout) -> None:
        self._snapshots, self._is_measured = snapshots, device.type == "cpu"
        self._functional = "all_to_all" if layout.shares_experts else "tensor_parallel"
        self._number = self._since = 0  # of this generation's steps
        self._told: tuple[int, float] | None = None  # step, exposed share: what the journal has
        snapshots.take_overlap()

    def begin(self) -> None:
        self._number += 1
        if self._is_due:
            WAITS.begin()

    @property
    def _is_due(self) -> bool:
        return self._is_measured and (self._number == FIRST or self._number % EVERY_STEPS == 0)

    def measured(self) -> dict[str, SecondsByKind]:
        """Of the step that has just been made, seconds by kind; nothing where it was not measured.
        A snapshot's are the mean of a step since the last one that was."""
        if not self._is_due:
            return {}
        exposed, hidden = WAITS.take()
        if FUNCTIONAL in exposed:
            exposed[self._functional] = exposed.pop(FUNCTIONAL) + exposed.get(self._functional, 0.0)
        steps, self._since = self._number - self._since, self._number
        waited_s, behind_s = self._snapshots.take_overlap()
        if waited_s + behind_s:
            exposed["snapshot"], hidden["snapshot"] = waited_s / steps, behind_s / steps
        return {"exposed_s": _rounded(exposed), "hidden_s": _rounded(hidden)}

    def told(
        self, step: int, step_s: float, spent: Spent, note: Callable[..., None] | None
    ) -> dict[str, SecondsByKind]:
        """As ``measured``. The controller hears of it by ``spent``, the journal by ``note``."""
        found = self.measured()
        if found:
            spent.add("exposed_s", sum(found["exposed_s"].values()))
            spent.add("links_s", on_links(found["exposed_s"]))
            if note is not None and (reason := self.news(step_s, **found)):
                note("overlap", reason, {"step": step, "step_s": step_s, **found})
        return found

    def news(self, step_s: float, exposed_s: SecondsByKind, hidden_s: SecondsByKind) -> str:
        """What the journal should say of a step that was ``measured``: of the first, and of those
        in which the share is another, ever more seldom. Else nothing."""
        share = sum(exposed_s.values()) / max(step_s, 1e-9)
        if self._told is not None:
            number, before = self._told
            if self._number < 2 * number or abs(share - before) < CHANGED:
                return ""
        self._told = self._number, share
        return (
            f"of a step of {step_s * 1e3:.1f} ms, computing waits {share:.0%}"
            f"{_in_words(exposed_s)}; hidden behind it{_in_words(hidden_s) or ' is nothing'}"
        )

    def close(self) -> None:
        WAITS.end()


def _rounded(seconds: SecondsByKind) -> SecondsByKind:
    return {kind: round(s, 6) for kind, s in sorted(seconds.items())}


def _in_words(seconds: SecondsByKind) -> str:
    told = sorted(seconds.items(), key=lambda item: -item[1])
    parts = [f"{kind} {s * 1e3:.1f} ms" for kind, s in told if s >= 5e-5]
    return f": {', '.join(parts)}" if parts else ""
