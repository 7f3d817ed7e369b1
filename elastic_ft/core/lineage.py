"""Which generation computed each step of this history: what tells a state from its namesakes.

A generation goes on from one state and applies each step after it at most once. So a state is one
of a kind by its step and the generation that computed the step, whoever holds it and however it
was copied or restored since. Steps that were lost and trained again are other states.
"""

from __future__ import annotations

from dataclasses import dataclass

KEPT = 256  # generations; what an older one computed lies in no memory any more


@dataclass(frozen=True, slots=True)
class Lineage:
    """One history, as of its newest generation.

    Attributes:
        begun: (generation, the step that it went on from); both rise.
    """

    begun: tuple[tuple[int, int], ...] = ()

    def on(self, generation: int, step: int) -> Lineage:
        """``generation`` goes on from ``step``: what others computed after it counts no more."""
        before = tuple(entry for entry in self.begun if entry[1] < step)
        return Lineage((*before, (generation, step))[-KEPT:])

    def up_to(self, step: int) -> Lineage:
        """As if no generation had begun at ``step`` or later: the one that computed ``step`` goes
        on after it."""
        return Lineage(tuple(entry for entry in self.begun if entry[1] < step))

    def generation_of(self, step: int) -> int | None:
        """Which computed ``step``; 0 for the seed's state, None if that is not known any more."""
        if step == 0:
            return 0
        return next((number for number, since in reversed(self.begun) if since < step), None)

    def has(self, step: int, generation: int) -> bool:
        """Whether the state of ``step`` that ``generation`` computed is one of this history."""
        return generation == self.generation_of(step)

    def last_before(self, generation: int) -> int | None:
        """The last step that counts of what was computed before ``generation`` and any later one.

        None if none has begun since: all of it counts.
        """
        return next((since for number, since in self.begun if number >= generation), None)
