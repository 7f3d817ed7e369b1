"""What came of a scenario, and how it is printed."""

from __future__ import annotations

from dataclasses import dataclass, field

from chaos.check import Verdict

PASSED, FAILED = 0, 1  # exit codes


@dataclass(slots=True)
class ScenarioOutcome:
    """``skipped``: why the scenario can't run here; then there is no verdict."""

    name: str
    tier: str
    seconds: float = 0.0
    verdicts: list[Verdict] = field(default_factory=list)
    skipped: str = ""
    summary: str = ""

    @property
    def passed(self) -> bool:
        return not self.skipped and all(verdict.passed for verdict in self.verdicts)

    @property
    def failures(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if not verdict.passed]

    def __str__(self) -> str:
        word = "SKIP" if self.skipped else "PASS" if self.passed else "FAIL"
        text = self.skipped or self.summary
        return f"{word}  {self.name:32} {self.tier:9} {self.seconds:6.1f} s  {text}"
