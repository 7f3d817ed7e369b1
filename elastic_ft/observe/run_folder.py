"""The run folder (DESIGN section 7): what a run did, readable from outside while it runs.

Lines are appended and flushed as they happen. A folder under a remote URL is written locally and
mirrored: object stores have no append.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any

import fsspec
import yaml

from elastic_ft.errors import JobFailed
from elastic_ft.observe import requests

MIRROR_EVERY_S = 5.0
OWNER = "controller.json"  # whose run this is, while it lasts
FILES = ("job.yaml", "events.jsonl", "inbox.jsonl", "steps.jsonl", "ledger.jsonl", "result.json")


class RunFolder:
    """Attributes:
    path: the local folder.
    url: what the user named: the same, or a remote URL it is mirrored to.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._remote = "://" in url and not url.startswith("file://")
        if self._remote:
            self.path = Path(tempfile.mkdtemp(prefix="elastic_ft_run_"))
            self._filesystem, self._remote_path = fsspec.core.url_to_fs(
                self.url, use_listings_cache=False
            )
            self._fetch()
        else:
            self.path = Path(self.url.removeprefix("file://")).absolute()
            self.path.mkdir(parents=True, exist_ok=True)
        self._files: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._sequence = count_lines(self.path / "events.jsonl")
        self._tokens = 0
        self._stop_mirror = threading.Event()
        self._mirrored: dict[str, int] = {}
        self._request_seen_ns = 0
        self._owner: tuple[int, int] | None = None  # what controller.json is, while it is ours
        self._mirror_thread: threading.Thread | None = None
        if self._remote:
            self._mirror_thread = threading.Thread(target=self._mirror_always, daemon=True)
            self._mirror_thread.start()
        self.mirror_error = ""

    # ----------------------------------------------------------------- writing

    def write_job(self, job: dict[str, Any]) -> None:
        (self.path / "job.yaml").write_text(yaml.safe_dump(job, sort_keys=False))

    def recorded_job(self) -> dict[str, Any]:
        """The job of the run before this one; {} if there was none, or it can't be read."""
        try:
            values = yaml.safe_load((self.path / "job.yaml").read_text())
        except (OSError, ValueError, yaml.YAMLError):
            return {}
        return values if isinstance(values, dict) else {}

    def journal(
        self, at_s: float, event: str, generation: int, reason: str, fields: dict[str, Any]
    ) -> dict[str, Any]:
        """Appends one line to events.jsonl and returns it (I8)."""
        with self._lock:
            line = {
                "at_s": round(at_s, 6),
                "seq": self._sequence,
                "generation": generation,
                "event": event,
                "reason": reason,
                **fields,
            }
            self._sequence += 1
            self._append("events.jsonl", line)
        return line

    def record_inbox(self, line: dict[str, Any]) -> None:
        with self._lock:
            self._append("inbox.jsonl", line)

    def record_step(self, line: dict[str, Any], sample_ids: list[int] | None) -> None:
        """Appends a committed step, after its ledger line: a step line has its samples."""
        with self._lock:
            if sample_ids is not None:
                self._append(
                    "ledger.jsonl",
                    {
                        "step": line["step"],
                        "generation": line["generation"],
                        "samples": sample_ids,
                    },
                )
            self._append("steps.jsonl", line)

    def take_over(self, run: str) -> str | None:
        """This is controller ``run``'s now. Returns whose it was, if that one did not end it.

        If that one lives it ends, by ``check_owner``, without another line here.
        """
        path = self.path / OWNER
        before = json.loads(path.read_text())["run"] if path.exists() else None
        swap = path.with_suffix(".tmp")
        swap.write_text(json.dumps({"run": run}) + "\n")
        self._owner = _identity(swap)
        swap.replace(path)
        return before

    def check_owner(self) -> None:
        """Raises JobFailed if another controller has taken this folder over, or did and ended."""
        if not self.is_ours:
            taken = "is no longer this controller's: another has taken it over"
            raise JobFailed(f"{self.path} {taken}")

    @property
    def is_ours(self) -> bool:
        return self._owner is None or self._owner == _identity(self.path / OWNER)

    def last_step(self) -> int:
        """The last step recorded; 0 if none is."""
        lines = read_lines(self.path / "steps.jsonl")
        return lines[-1]["step"] if lines else 0

    def truncate(self, step: int) -> None:
        """Voids the lines of steps after ``step``, and torn last lines."""
        with self._lock:
            for name in ("steps.jsonl", "ledger.jsonl"):
                self._close_file(name)
                path = self.path / name
                if path.exists():
                    kept = [line for line in read_lines(path) if line["step"] <= step]
                    swap = path.with_suffix(".tmp")
                    swap.write_text("".join(json.dumps(line) + "\n" for line in kept))
                    swap.replace(path)

    def repair(self) -> None:
        """Drops a torn last line of the journals, left by a controller that died writing."""
        for name in ("events.jsonl", "inbox.jsonl"):
            path = self.path / name
            if path.exists() and not path.read_bytes().endswith(b"\n"):
                text = path.read_bytes()
                path.write_bytes(text[: text.rfind(b"\n") + 1])
        self._sequence = count_lines(self.path / "events.jsonl")

    def write_result(self, result: dict[str, Any]) -> None:
        self.check_owner()
        swap = self.path / "result.json.tmp"
        swap.write_text(json.dumps(result, indent=2) + "\n")
        swap.replace(self.path / "result.json")
        self._owner = None
        (self.path / OWNER).unlink(missing_ok=True)

    def _append(self, name: str, line: dict[str, Any]) -> None:
        self.check_owner()
        file = self._files.get(name)
        if file is None:
            file = self._files[name] = (self.path / name).open("a")
        file.write(json.dumps(line) + "\n")
        file.flush()

    def _close_file(self, name: str) -> None:
        file = self._files.pop(name, None)
        if file is not None:
            file.close()

    def close(self) -> None:
        with self._lock:
            for name in list(self._files):
                self._close_file(name)
        if self._mirror_thread is not None:
            self._stop_mirror.set()
            self._mirror_thread.join(60)
            self._mirror()
            if not self.mirror_error:
                shutil.rmtree(self.path, ignore_errors=True)

    # --------------------------------------------------------------- requests

    def new_request(self) -> requests.Resize | None:
        """What was asked for since the last look. Raises ValueError if it makes no sense."""
        path = self.path / requests.NAME
        try:
            seen_ns = path.stat().st_mtime_ns
            if seen_ns == self._request_seen_ns:
                return None
            self._request_seen_ns = seen_ns
            return requests.parse(path.read_bytes())
        except FileNotFoundError:
            return None

    def drop_request(self) -> None:
        """The job has ended: nobody is to obey it any more."""
        (self.path / requests.NAME).unlink(missing_ok=True)
        if not self._remote:
            return
        try:
            self._filesystem.rm_file(f"{self._remote_path}/{requests.NAME}")
        except FileNotFoundError:
            return
        except Exception as error:  # any backend's own errors: the next start would obey it
            self.mirror_error = f"{requests.NAME}: {type(error).__name__}: {error}"

    def _fetch_request(self) -> None:
        """From a remote folder: there is nothing to be told by."""
        remote, path = f"{self._remote_path}/{requests.NAME}", self.path / requests.NAME
        if not self._filesystem.exists(remote):
            return
        content = self._filesystem.cat_file(remote)
        if not path.exists() or path.read_bytes() != content:
            swap = path.with_suffix(".tmp")
            swap.write_bytes(content)
            swap.replace(path)

    # --------------------------------------------------------------- mirroring

    def _fetch(self) -> None:
        self._fetch_request()
        for name in FILES:
            remote = f"{self._remote_path}/{name}"
            if self._filesystem.exists(remote):
                (self.path / name).write_bytes(self._filesystem.cat_file(remote))

    def _mirror_always(self) -> None:
        while not self._stop_mirror.wait(MIRROR_EVERY_S):
            self._mirror()

    def _mirror(self) -> None:
        """Uploads what has grown or changed. A failure is kept for the report and retried."""
        self.mirror_error = ""
        try:
            self._fetch_request()
        except Exception as error:  # any backend's own errors: reported, retried
            self.mirror_error = f"{requests.NAME}: {type(error).__name__}: {error}"
        for name in FILES:
            path = self.path / name
            try:
                stamp = path.stat().st_mtime_ns
            except FileNotFoundError:
                continue
            if self._mirrored.get(name) == stamp:
                continue
            try:
                self._filesystem.pipe_file(f"{self._remote_path}/{name}", path.read_bytes())
                self._mirrored[name] = stamp
            except Exception as error:  # any backend's own errors: reported, retried
                self.mirror_error = f"{name}: {type(error).__name__}: {error}"


def last_generation(path: Path) -> int:
    """The newest generation that a journal knows of."""
    return max((line["generation"] for line in read_lines(path)), default=0)


def count_lines(path: Path) -> int:
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a .jsonl file; a torn last line is left out."""
    if not path.exists():
        return []
    text = path.read_text()
    whole = text[: text.rfind("\n") + 1]
    return [json.loads(line) for line in whole.splitlines()]


def _identity(path: Path) -> tuple[int, int]:
    """Of the file that is there now, also once it is renamed; of none if there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return (0, 0)
    return (found.st_ino, found.st_mtime_ns)
