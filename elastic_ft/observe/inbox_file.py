"""inbox.jsonl: all that the core was told, with snapshots of its state between the lines."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

from elastic_ft.observe import files, segments
from elastic_ft.observe.appended import AppendedFiles

INBOX_BYTES = 16 << 20  # then it begins anew, with a snapshot of the core's state
SNAPSHOT_LINES = 1500  # then comes a snapshot between them: told again in a quarter of a second
SNAPSHOT_SHARE = 20  # of the bytes between two, the later one is no more than one part
SNAPSHOT = b'"type": "Snapshot"'  # near the beginning of such a line
HEAD_BYTES = 64


class InboxFile(AppendedFiles):
    """That part of a run folder.

    Attributes:
        is_remote: it is mirrored, in segments: each line has its number.
    """

    is_remote = False

    def __init__(self) -> None:
        super().__init__()
        self._sequence = self._inbox_bytes = 0
        self._inbox_lines = 0  # of a remote folder
        self._since_snapshot = [0, 0, 0]  # lines, bytes; bytes of the snapshot itself
        self._replaced = dict.fromkeys(segments.NUMBERS, 0)  # how often

    def record_inbox(self, line: dict[str, Any]) -> None:
        with self._lock:
            self._record_inbox(line)

    def _record_inbox(self, line: dict[str, Any]) -> int:
        written = self._append("inbox.jsonl", self._in_inbox(line))
        self._inbox_bytes += written
        self._since_snapshot[0] += 1
        self._since_snapshot[1] += written
        return written

    def _in_inbox(self, line: dict[str, Any]) -> dict[str, Any]:
        """With its number, where segments go by it."""
        if not self.is_remote:
            return line
        self._inbox_lines += 1
        return {"line": self._inbox_lines - 1, **line}

    def _count_inbox(self) -> None:
        """As another has left it: who goes on there has told all since the newest snapshot again,
        and so would the next one."""
        path = self.path / "inbox.jsonl"
        content = path.read_bytes() if path.exists() else b""
        begin = next(snapshot_lines(content), 0)
        end = content.find(b"\n", begin) + 1 if begin else 0
        self._inbox_bytes, self._inbox_lines = len(content), content.count(b"\n")
        self._since_snapshot = [content.count(b"\n", end), len(content) - end, end - begin]

    @property
    def inbox_is_full(self) -> bool:
        return self._inbox_bytes >= INBOX_BYTES

    @property
    def snapshot_is_due(self) -> bool:
        lines, nbytes, own = self._since_snapshot
        return lines >= SNAPSHOT_LINES and nbytes >= SNAPSHOT_SHARE * own

    def begin_inbox(
        self, at_s: float, policy: dict[str, Any], state: Any, beside: Any = None
    ) -> None:
        """What was told so far gives way to the core's ``state``, as JSON types. ``beside``: what
        else a controller needs that goes on from there."""
        with self._lock:
            self.check_owner()
            self._close_file("inbox.jsonl")
            self._before_snapshot()
            self._inbox_lines = 0
            begun = self._snapshot(at_s, state, beside)
            lines = "".join(files.line_of(self._in_inbox(line)) for line in (policy, begun))
            files.replace(self.path / "inbox.jsonl", lines.encode(), self.check_owner)
            self._replaced["inbox.jsonl"] += 1
            self._inbox_bytes, self._since_snapshot = 0, [0, 0, len(lines)]

    def snapshot(self, at_s: float, policy: dict[str, Any], state: Any, beside: Any) -> None:
        """The same, between the lines: who goes on from it need not read what is before."""
        with self._lock:
            written = self._record_inbox(policy)
            written += self._record_inbox(self._snapshot(at_s, state, beside))
            self._since_snapshot = [0, 0, written]

    @abstractmethod
    def _before_snapshot(self) -> None:
        """All that was written is durable before what leads to it is replaced, or with that."""

    def _snapshot(self, at_s: float, state: Any, beside: Any) -> dict[str, Any]:
        begun = {"type": "Snapshot", "at_s": at_s, "seq": self._sequence, "state": state}
        return begun if beside is None else begun | {"beside": beside}


def snapshot_lines(inbox: bytes) -> Iterator[int]:
    """Where they begin, the newest first."""
    begin = inbox.rfind(b"\n") + 1
    while (begin := inbox.rfind(SNAPSHOT, 0, begin)) >= 0:
        line = inbox.rfind(b"\n", 0, begin) + 1
        if line and begin - line <= HEAD_BYTES:  # else it is said somewhere in a line
            yield line
