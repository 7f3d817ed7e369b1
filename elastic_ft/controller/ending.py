"""How a controller ends: what it leaves to whom, and what stands in result.json."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import Any

from elastic_ft.controller.parts import ControllerParts
from elastic_ft.core import commands as cmd
from elastic_ft.core import deadlines
from elastic_ft.core.commits import UNSAVED
from elastic_ft.core.state import Turn
from elastic_ft.errors import JobFailed, StoreFailed, one_line
from elastic_ft.observe.metrics import write_targets
from elastic_ft.observe.outcome import complete
from elastic_ft.observe.run_reader import RunReader

UNKNOWN_BYTES = 1 << 60  # as long as they try by themselves


class ControllerEnding(ControllerParts):
    """That part of a ``Controller``."""

    def _complete(self) -> dict[str, Any]:
        """The result of the job that is complete; {} if it is not."""
        ended = RunReader(self.run_folder.url).result()
        if self.policy.from_scratch or not complete(ended, self.job.steps):
            return {}
        self.run_folder.close()
        return ended

    def _failed(self, error: Exception) -> None:
        """The journal's last line says why, and a remote folder has it. Another job's does not."""
        reason = one_line(error)
        with contextlib.suppress(OSError, StoreFailed, JobFailed):  # it may be what has failed
            if self.run_folder.is_ours:
                self._observer.journal("controller_failed", self.state.generation, reason, {})
        with contextlib.suppress(OSError):  # of a full disk: what it does not take is lost now
            self.run_folder.close()

    def _give_up(self) -> dict[str, Any]:
        """The job has ended before it could begin: what is in the run folder stays as it is."""
        assert self._finish is not None
        self._ended_at_s = time.time()
        if self._connections.was_opened:  # to adopt who lives, and that is not ours to end
            self._closed = True
            self._leave()
        else:
            self._publisher.close()
        self.state = replace(self.state, committed=self._takeover.recorded)
        return self._result(self._finish)

    def _leave(self) -> None:
        """Nobody is killed, and nothing more is said."""
        self._durability.close()
        self._connections.close()
        self.host.leave()
        self._observer.metrics.close()
        self._publisher.close(at_once=True)

    def _close(self) -> None:
        """What no checkpoint has, keepers save first. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._durability.close()
        if self._has_lost_the_job():
            self._leave()
            return
        self._connections.say_farewell()
        # Who asks to stop gives it some seconds, and kills it then.
        is_stopped = self._finish is not None and self._finish.status == "stopped"
        if self._left_unsaved():
            self._connections.close()
            self.host.close(self._save_s(is_stopped))
        else:
            self._connections.release_keepers()
            self.host.close()
        self._connections.close()
        self._observer.metrics.close()
        if self._connections.was_opened and self.run_folder.is_ours:
            with contextlib.suppress(OSError):  # a disk that is full has said so before
                write_targets(self.run_folder.path, "")
        self._publisher.close(at_once=is_stopped)

    def _save_s(self, is_stopped: bool) -> float:
        """What keepers get. Those that an earlier controller had have not said what they have."""
        give_up_s = self.job.elastic.suspend_timeout_s
        if self._heir.ends_unsaved and not is_stopped:
            return deadlines.save_s(UNKNOWN_BYTES, give_up_s)
        nbytes = 0 if is_stopped else max(self._hearing.kept.values(), default=0)
        return deadlines.save_s(nbytes, give_up_s)

    def _has_lost_the_job(self) -> bool:
        """Another has it, or it never was ours: who lives is not ours to kill."""
        if self._is_superseded or (self._connections.was_opened and not self.run_folder.is_ours):
            return True
        return bool(self._heir.survivors) and not self._publisher.has_claim

    def _left_unsaved(self) -> bool:
        """Whether keepers may have steps that the next start would train again."""
        if not self._connections.was_opened:
            return False  # there were none
        if self._finish is None:
            return True
        return self._finish.status != "completed" and self.state.committed > self._newest()

    def _newest(self) -> int:
        """The step of the newest checkpoint, 0 if there is none."""
        return max((ref.step for ref in self.state.checkpoints), default=0)

    def _without_damaged(self, finish: cmd.FinishJob) -> cmd.FinishJob:
        """Of a checkpoint that is found damaged while the job ends, the core hears no more. Workers
        and keepers have let go of its state by then: who resumes the job trains its steps again."""
        kept = tuple(ref for ref in self.state.checkpoints if ref.url not in self._hearing.damaged)
        if len(kept) == len(self.state.checkpoints):
            return finish
        self.state = replace(self.state, checkpoints=kept)
        last_good = Turn(self.state, self.policy, time.time()).last_good()
        why = "; ".join(self._hearing.damaged.values())
        if finish.status != "completed":
            return replace(finish, reason=f"{finish.reason}; found since: {why}; {last_good}")
        if not self.policy.final_checkpoint or self._newest() >= self.state.committed:
            return finish
        reason = f"{finish.reason}, {UNSAVED}: {why}; {last_good}"
        return replace(finish, status="suspended", reason=reason)

    def _tell_end(self, finish: cmd.FinishJob) -> None:
        """The journal's last line, which says what result.json does."""
        at_s = self._executor.finished_at_s or time.time()
        is_decided = finish == self._executor.finish
        self._observer.finished(at_s, self.state.generation, finish, is_decided)

    def _result(self, finish: cmd.FinishJob) -> dict[str, Any]:
        for told in self._inbox.take(0.0):
            self._hearing.hear_late(told)
        unsaved = self._left_unsaved()  # as it was known when keepers were let go
        finish = self._without_damaged(finish)
        if unsaved:
            saved = self._takeover.saved_in_words(self._newest())
            finish = replace(finish, reason=finish.reason + saved)
        self._tell_end(finish)
        result = self._observer.result(finish, self.state, self._ended_at_s, self._fired)
        self.run_folder.drop_request()
        self.run_folder.write_result(result)
        self._report.write(result)
        if not unsaved:  # first: who is killed now leaves no keepers to be waited for
            self._publisher.ended()
        self.run_folder.close()
        return result
