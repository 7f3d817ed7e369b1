"""Where a member's code is on its way from one step to the next, as far as others must know.

before its first batch -> it has asked for that -+
after a step -> it has asked for the next batch -+-> in that step's function

A generation may break anywhere on that way, and the next one begin with members at several places.
Who came in for the lost is behind all others, and so is who broke off in a step that the others
have made: it has their state, and its code goes on with the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NEW, NEW_ASKED, STRADDLED, AFTER, ASKED, IN_STEP = (part * 2.0**20 for part in range(6))


@dataclass(slots=True)
class Whereabouts:
    """Attributes:
    is_new: it has begun no step yet.
    has_asked: for the next batch, since the last step.
    errands, is_pending: begun in this part of the way, and whether one is under way.
    step: of which the function was begun and is not made yet; 0: none.
    """

    is_new: bool = True
    has_asked: bool = False
    errands: int = 0
    is_pending: bool = False
    step: int = 0

    def ask(self) -> None:
        if not self.has_asked:
            self.has_asked, self.errands = True, 0

    def begin_errand(self) -> None:
        if not self.is_pending:
            self.errands += 1
        self.is_pending = True

    def begin_step(self, number: int) -> None:
        self.is_new, self.errands, self.step = False, 0, number

    def end_step(self) -> None:
        self.has_asked, self.errands, self.step = False, 0, 0

    def in_words(self) -> str:
        """Where it may wait for others in a collective; "" elsewhere. The same for all who are at
        one place, who has just come included."""
        if self.step:
            return f"is in the function of step {self.step}"
        if self.is_pending:
            return f"is in evaluation or export {self.errands} between two steps"
        return ""

    def place(self, restored: int) -> float:
        """As a number that grows with the way; equal for those who come to the same errands.

        ``restored``: the step whose state the generation begins with.
        """
        if self.step:
            return IN_STEP if self.step > restored else STRADDLED
        new, old = (NEW_ASKED, ASKED) if self.has_asked else (NEW, AFTER)
        return (new if self.is_new else old) + 2 * self.errands + self.is_pending


def without_catching_up(places: Sequence[float]) -> list[float]:
    """The same, where who is new has nothing to catch up with: all are at the next batch."""
    is_same = {place for place in places if place >= STRADDLED} <= {ASKED}
    return [ASKED if is_same and place == NEW_ASKED else place for place in places]


def furthest(places: Sequence[float]) -> int | None:
    """A rank that has gone furthest; None if all are at one place."""
    return places.index(max(places)) if len(set(places)) > 1 else None
