"""A run's committed steps for Weights & Biases and MLflow: each step once, whatever happened.

As ``observe.tensorboard``, from outside the run, with a cursor. But neither can take a step back:
where the run went back to an earlier step, all of it is written anew, and replaces what was there.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from elastic_ft.errors import UsageError
from elastic_ft.observe.lines import Line
from elastic_ft.observe.step_cursor import Cursor, lock_folder, numbers_of, read_cursor

METRICS_AT_ONCE = 1000  # that MLflow takes
GENERATION = "generation"
NOT_IN_A_NAME = re.compile(r"[^\w\-. :/]", re.ASCII)  # of MLflow's metrics


class WholeLog(ABC):
    """Args:
    folder: for the cursor, and for what the tool writes to disk.
    whole: returns all committed steps, in their order.
    """

    tool: str

    def __init__(self, folder: Path, whole: Callable[[], Iterable[Line]]) -> None:
        self._folder, self._whole = folder, whole
        self._lock = lock_folder(folder, self.tool)
        self.cursor = read_cursor(folder)

    def write(self, lines: Iterable[Line]) -> int:
        """Of steps.jsonl, in their order; returns how many were written."""
        count = 0
        for line in lines:
            if self.cursor.knows(line):
                continue  # read again
            if line["step"] <= self.cursor.step or not self._goes_on(line):
                self.cursor = Cursor(writers=self.cursor.writers + 1)
                self.cursor.save(self._folder)  # killed from here on, it is begun anew
                self.cursor = replace(self.cursor, run=self._anew())
                again = self._whole()
            else:
                again = [line]
            for known in again:
                self._put(known)
                count += 1
                step, generation = known["step"], known["generation"]
                self.cursor = replace(self.cursor, step=step, generation=generation)
        if count:
            self._flush()
        return count

    def close(self) -> None:
        try:
            self._end()
        finally:
            self._lock.close()

    @abstractmethod
    def _goes_on(self, line: Line) -> bool:
        """Whether ``line`` can follow on the cursor's step."""

    @abstractmethod
    def _anew(self) -> str:
        """Begins with nothing; returns the tool's name of it."""

    @abstractmethod
    def _put(self, line: Line) -> None: ...

    @abstractmethod
    def _flush(self) -> None:
        """What was put is on its way; the cursor is saved by whoever knows that it has come."""

    @abstractmethod
    def _end(self) -> None:
        """No more comes."""


class WandbLog(WholeLog):
    """An offline run, for ``wandb sync``: one, of all committed steps, whoever was killed before.

    Raises UsageError without wandb, or where another one writes to ``folder``.
    """

    tool = "wandb"

    def __init__(
        self, folder: Path, whole: Callable[[], Iterable[Line]], name: str, project: str
    ) -> None:
        try:
            import wandb
        except ImportError:
            raise UsageError("wandb: is not installed: pip install wandb") from None
        super().__init__(folder, whole)
        self._wandb: Any = wandb
        self._name, self._project, self._id = name, project, _id_in(folder)
        self._run: Any = None

    def _goes_on(self, line: Line) -> bool:
        return self._run is not None  # a process can't add to an offline run of another

    def _anew(self) -> str:
        self._end()
        for mine in (self._folder / "wandb").glob(f"offline-run-*-{self._id}"):
            shutil.rmtree(mine)  # others' may be beside it
        quiet = self._wandb.Settings(
            silent=True, console="off", disable_git=True, save_code=False, x_disable_stats=True
        )
        self._run = self._wandb.init(
            project=self._project,
            name=self._name,
            id=self._id,
            dir=str(self._folder),
            mode="offline",
            settings=quiet,
        )
        return str(self._run.id)

    def _put(self, line: Line) -> None:
        assert self._run is not None
        self._run.log(dict(numbers_of(line)), step=line["step"])

    def _flush(self) -> None:
        """Only ``finish`` says that all is on disk; what is killed before is written anew."""

    def _end(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None
            self.cursor.save(self._folder)

    def close(self) -> None:
        super().close()
        self._wandb.teardown()  # its process


def _id_in(folder: Path) -> str:
    """By which an offline run is known to be of this folder's writers."""
    path = folder / "run-id"
    if not path.exists():
        path.with_suffix(".partial").write_text(uuid.uuid4().hex[:12])
        path.with_suffix(".partial").replace(path)
    return path.read_text()


class MlflowLog(WholeLog):
    """A run in MLflow's store, which is asked what it has already: a writer that was killed before
    its cursor was saved makes nothing double. What is written anew is another run; the one before
    is deleted there.

    Raises UsageError without mlflow, where another one writes to ``folder``, and for a store that
    can't be used.
    """

    tool = "mlflow"

    def __init__(
        self,
        folder: Path,
        whole: Callable[[], Iterable[Line]],
        name: str,
        experiment: str,
        tracking_uri: str | None = None,
    ) -> None:
        try:
            import mlflow
        except ImportError:
            raise UsageError("mlflow: is not installed: pip install mlflow") from None
        self._error: Any = mlflow.exceptions.MlflowException
        self._metric: Any = mlflow.entities.Metric
        super().__init__(folder, whole)
        self._name, self._there = name, dict[str, dict[int, float]]()
        self._waiting: list[Any] = []
        try:
            with self._told_in_a_line():
                self._client: Any = mlflow.MlflowClient(tracking_uri=tracking_uri)
                found = self._client.get_experiment_by_name(experiment)
                self._experiment = (
                    found.experiment_id if found else self._client.create_experiment(experiment)
                )
        except UsageError:
            self._lock.close()
            raise

    def write(self, lines: Iterable[Line]) -> int:
        """As WholeLog's. Raises UsageError where the store can't be reached."""
        with self._told_in_a_line():
            return super().write(lines)

    @contextlib.contextmanager
    def _told_in_a_line(self) -> Iterator[None]:
        try:
            yield
        except self._error as error:
            raise UsageError(f"mlflow: {str(error).splitlines()[0]}") from None

    def _goes_on(self, line: Line) -> bool:
        """What another writer has put before it was killed may have been made again since."""
        if not self.cursor.run:
            return False
        there = self._known(GENERATION).get(line["step"])
        return there is None or there == line["generation"]

    def _known(self, key: str) -> dict[int, float]:
        """What the store has of a metric, by step."""
        if key not in self._there:
            history = self._client.get_metric_history(self.cursor.run, key)
            self._there[key] = {point.step: point.value for point in history}
        return self._there[key]

    def _anew(self) -> str:
        self._waiting.clear()
        self._there.clear()
        # By a tag, not by the cursor: a writer may have been killed before it was saved.
        where = f"tags.`elastic_ft.folder` = '{self._folder}'"
        for run in self._client.search_runs([self._experiment], where):
            self._client.delete_run(run.info.run_id)
        tags = {"elastic_ft.folder": str(self._folder)}
        run = self._client.create_run(self._experiment, run_name=self._name, tags=tags)
        return str(run.info.run_id)

    def _put(self, line: Line) -> None:
        step, at_ms = line["step"], int(1000 * (line.get("applied_at_s") or 0))
        # Its generation first: a store of files writes one after the other.
        for name, value in sorted(numbers_of(line), key=lambda pair: pair[0] != GENERATION):
            key = NOT_IN_A_NAME.sub("_", name)
            known = self._known(key)
            if step not in known:
                known[step] = value
                self._waiting.append(self._metric(key, value, at_ms, step))
            if len(self._waiting) == METRICS_AT_ONCE:
                self._send()

    def _send(self) -> None:
        self._client.log_batch(self.cursor.run, self._waiting)
        self._waiting.clear()

    def _flush(self) -> None:
        if self._waiting:
            self._send()
        self.cursor.save(self._folder)

    def _end(self) -> None:
        if self.cursor.run:
            with self._told_in_a_line():
                self._client.set_terminated(self.cursor.run)
