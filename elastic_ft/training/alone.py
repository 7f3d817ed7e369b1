"""A world of one, without a launcher: the controller is a thread of the script's own process.

The loop, the state, its checkpoints and the run folder are those of any job, so that a script is
written and debugged as it will run.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch

from elastic_ft.config import Job, parse_job, parse_yaml
from elastic_ft.controller.controller import Controller
from elastic_ft.controller.host import Host, Tell
from elastic_ft.core.assignment import Assignment, NodeId, WorkerId
from elastic_ft.errors import ConfigError, JobFailed, UsageError
from elastic_ft.observe.run_folder import RunFolder
from elastic_ft.transport.tls import JobKey
from elastic_ft.worker.this_process import member_here
from elastic_ft.worker.worker import Worker

STANDS_S = 300.0  # a controller's thread; it waits for nothing but a disk, which may hang
LOOK_S = 0.5
END_TIMEOUT_S = 900.0  # of a job that is over: a store that is away is waited for
AT_ONCE_S = 2.0  # for a controller that is asked again to stop
FAILED, INTERRUPTED = 1, 130


class ThisProcess(Host):
    """A host with one worker, which is this process and can't be replaced."""

    def __init__(self) -> None:
        self.started = threading.Event()
        self.address: tuple[str, int] = ("", 0)
        self.key = JobKey(b"")

    def survivors(self) -> frozenset[WorkerId]:
        return frozenset()

    def start(self, inbox: Tell, address: tuple[str, int], key: JobKey) -> None:
        self.address, self.key = address, key
        self.started.set()

    def want_workers(self, total: int) -> None: ...

    def use_places(self, places: dict[NodeId, int]) -> None: ...

    def avoid_node(self, node: NodeId, for_s: float) -> None: ...

    def kill_worker(self, worker: WorkerId) -> None: ...

    def kill_keeper(self, node: NodeId) -> None: ...

    def prepare(self, assignment: Assignment) -> dict[WorkerId, dict[str, Any]]:
        return {}

    def formed(self, assignment: Assignment) -> None: ...

    def close(self, keepers_s: float = 0.0) -> None: ...

    def leave(self) -> None: ...


class Alone:
    """Attributes:
    worker: this process's.
    """

    def __init__(self, job: Job) -> None:
        self._host, self._result = ThisProcess(), dict[str, Any]()
        self._error: BaseException | None = None
        folder = RunFolder(f"runs/{job.name}")
        self._folder_url = folder.url
        url = job.checkpoint.url or f"{folder.url}/checkpoints"
        self._controller = Controller(job, self._host, folder, url)
        self._thread = threading.Thread(target=self._run, name="controller", daemon=True)
        self._thread.start()
        while not self._host.started.wait(0.05):
            if not self._thread.is_alive():
                if self._error is not None:
                    raise self._error
                raise UsageError(f"runs/{job.name} is complete: give another name, or delete it")
        os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
        member = member_here("w0", "n0", os.uname().nodename)
        self.worker = Worker(self._host.address, self._host.key, member, None)
        # Private, as ``atexit`` comes too late: pools of threads take no work any more by then.
        threading._register_atexit(self.end)  # type: ignore[attr-defined]

    def _run(self) -> None:
        try:
            self._result = self._controller.run()
        except BaseException as error:
            self._error = error

    def end(self) -> None:
        """The script has ended: the job ends with it, by what ended the script. An interrupt ends
        it at once, whatever the controller does."""
        try:
            self._end()
        except KeyboardInterrupt:
            self._end_at_once()

    def _end(self) -> None:
        error, idle = getattr(sys, "last_value", None), None
        if isinstance(error, Exception):
            said = f"the script raised {type(error).__name__}: {error}"
            self.worker.raised(UsageError(said))  # it is not tried again: the process ends
        elif error is None and (idle := self._idle()) is not None:
            self.worker.raised(idle)
        else:
            if isinstance(error, KeyboardInterrupt):
                self._controller.stop("interrupted")
            with self._watched():
                self.worker.finish()
        self._thread.join(END_TIMEOUT_S)
        if self._thread.is_alive():
            self._leave(FAILED, f"its controller does not end, {END_TIMEOUT_S:g} s after its job")
        self.worker.close()
        if idle is not None:
            self._exit(FAILED, f"elastic_ft: {idle}")

    def _idle(self) -> UsageError | None:
        """What is wrong with a script that has trained nothing, and ends as if it had."""
        try:
            self.worker.check_iterated()
        except UsageError as error:
            return error
        return None

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """While the job goes on to its end by what the controller does."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(LOOK_S):
                if self._thread.is_alive() and self._controller.stands_s > STANDS_S:
                    self._leave(FAILED, f"its controller stands still, for {STANDS_S:g} s now")

        threading.Thread(target=watch, name="alone-end", daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def _end_at_once(self) -> None:
        with contextlib.suppress(KeyboardInterrupt):
            self._controller.stop("interrupted")
            self._controller.stop("interrupted again")  # the first may have been a script's end
            self._thread.join(AT_ONCE_S)
        if not self._thread.is_alive():
            return self.worker.close()
        why = "interrupted again: ended at once, though its controller does not answer"
        self._leave(INTERRUPTED, why)

    def _leave(self, code: int, why: str) -> NoReturn:
        where = f"the same script goes on from the newest checkpoint of {self._folder_url}"
        self._exit(code, f"elastic_ft: {why}; {where}")

    def _exit(self, code: int, said: str) -> NoReturn:
        print(said, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # threads that hang would keep the interpreter from its end

    def failed(self) -> JobFailed:
        """Why there is no next step."""
        self._thread.join(END_TIMEOUT_S)
        return JobFailed(str(self._error or self._result.get("reason") or "the job has ended"))


def job_alone(job: Any, sections: dict[str, Any]) -> Job:
    """What ``init`` was given, as a job of one worker. Raises ConfigError, and UsageError where
    others have been started with this process: each would train alone."""
    world = os.environ.get("WORLD_SIZE", "")
    if world.isdigit() and int(world) > 1:
        raise UsageError(
            f"elastic_ft.init: one of {world} processes started by torchrun: use elastic-ft launch"
        )
    values: dict[str, Any] = {"name": Path(sys.argv[0] or "alone").stem or "alone"}
    if isinstance(job, (str, Path)):
        try:
            job = parse_yaml(Path(job).read_bytes(), str(job))
        except OSError as error:
            raise ConfigError(f"{job}: cannot be read: {error.strerror}") from None
    values |= {"loop": {}} | dict(job or {}) | sections
    values["elastic"] = dict(values.get("elastic") or {}) | {"min_workers": 1, "max_workers": 1}
    return parse_job(values)
