"""What the service tells of a large cluster: as much work as there is to tell."""

from __future__ import annotations

import random
import tracemalloc
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_ft.core.sharing.asks import SharingTerms, Wish
from elastic_ft.core.sharing.ledger import Sharing
from elastic_ft.core.table import Table
from elastic_ft.service import job_logs, line_stream
from elastic_ft.service.cluster_watch import Sight
from elastic_ft.service.handed_in import handed_in_job
from elastic_ft.service.job_orders import with_shared_parts
from elastic_ft.service.line_stream import Item, LineStream
from elastic_ft.service.share_standing import ShareStanding
from elastic_ft.service.story import STEP_KEYS, JobStory
from elastic_ft.service.views import service_view

NODES = 50


class Counted:
    """A job of one worker of two slots on each of two nodes; counts who asks where they are."""

    phase, has_room, slots = "running", True, 2

    def __init__(self, name: str, queue: str, first: int) -> None:
        self.job, self.wish, self.asked = name, Wish(1, 2, queue=queue), 0
        self._held = ((f"n{first}", 1), (f"n{first + 1}", 1))

    @property
    def held(self) -> Any:
        self.asked += 1
        return self._held


def test_each_job_is_asked_where_it_is_a_few_times_however_many_nodes_there_are() -> None:
    """Each was, once for each node: with thousands of both nobody else was answered meanwhile."""
    jobs = [Counted("a-1", "default", 0), Counted("b-2", "default", 1), Counted("c-3", "other", 0)]
    sharing = replace(
        Sharing(),
        jobs=Table({job.job: job for job in jobs}),
        nodes=Table({f"n{number}": 4 for number in range(NODES)}),
    )
    standing = ShareStanding(sharing=sharing)
    found = service_view(standing, SharingTerms(), Sight(), {}, lambda queue: queue == "default")
    told = {node["node"]: node["jobs"] for node in found["nodes"]}
    assert {node: jobs for node, jobs in told.items() if jobs} == {
        "n0": {"a-1": 2},
        "n1": {"a-1": 2, "b-2": 2},
        "n2": {"b-2": 2},
    }
    assert len(told) == NODES and found["slots"]["used"] == 12
    assert max(job.asked for job in jobs) < 5


def test_logs_go_on_after_what_has_no_end_of_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A progress bar's megabyte was read again and again; so was what was rotated away."""
    monkeypatch.setattr(job_logs, "READ_BYTES_MAX", 100)
    path, known, told = tmp_path / "worker-1-7.err", dict[str, int](), list[str]()

    def look() -> None:
        for name, _, offset, lines in job_logs._each_file(tmp_path, [7], known):
            known[name] = offset
            told.extend(lines)

    path.write_text("first\n")
    look()
    with path.open("a") as file:
        file.write("".join(f"\r{n:3}%" for n in range(101)) + "\nlast\n")
    for _ in range(8):
        look()
    assert told[0] == "first" and told[-1] == "last"
    assert "".join(told[1:-1]).count("%") == 101
    path.write_text("anew\n")
    look()
    assert told[-1] == "anew"


def test_a_step_takes_a_few_bytes_of_the_service_for_as_long_as_its_job_runs() -> None:
    """It took 450, of the last 50,000 of each job that runs: 22 MB each, which looked like a leak
    for the days until they were there."""
    stream, count = LineStream(), 20_000
    tracemalloc.start()
    try:
        for step in range(count):
            values = (step, 5.0 + 1 / (step + 1), 8192 * step, 4, 2, 1.7e9 + step / 3, "fsdp4")
            stream.add(Item(step, dict(zip(STEP_KEYS, values, strict=True))))
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken / count < 60, f"{taken / count:.0f} bytes each"
    assert stream.since(count - 1)[0] == [Item(count - 1, stream.data(count - 1)[0])]


def test_jobs_that_have_ended_have_in_common_what_is_alike_in_them() -> None:
    """Each kept 5.6 kB of its own for ever, nearly all of it what the defaults say."""
    model, data = {"preset": "decoder-1m"}, {"url": "stdlib:"}
    given = {"name": "a", "steps": 9, "model": model, "data": data}
    job = handed_in_job({"job": given})
    with_shared_parts(job.model_dump(mode="json"))
    count, kept = 200, list[Any]()
    tracemalloc.start()
    try:
        for steps in range(count):
            values = job.model_dump(mode="json") | {"steps": steps}
            kept.append(with_shared_parts(values))
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken / count < 1200, f"{taken / count:.0f} bytes each"
    assert kept[7] == job.model_dump(mode="json") | {"steps": 7}
    large = {"kwargs": {"text": "x" * 5000}}
    assert with_shared_parts({"model": large})["model"] is large
    assert with_shared_parts({"a": {"1": 1}}) != with_shared_parts({"a": {1: 1}})


@pytest.mark.parametrize("seed", range(20))
def test_a_packed_stream_tells_what_a_list_would(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_stream, "PACKED", 5)
    monkeypatch.setattr(line_stream, "KEPT_MAX", 40)
    rng, stream, told, step = random.Random(seed), LineStream(), list[Item](), 0
    for _ in range(rng.randint(0, 120)):
        back = rng.random() < 0.1
        step = max(0, step - rng.randint(0, 9)) if back else step + rng.randint(1, 3)
        told.append(Item(step, {"step": step}, "rolled_back" if back else ""))
        stream.add(told[-1])
    first = len(told) - len(stream)
    assert len(stream) >= min(len(told), 20)
    assert len(stream) <= 40 and stream.since(0)[0] == told[first:]
    for position in range(len(told) + 3):
        for most in (1, 4, 7, 1000):
            begin = max(position, first)
            found = told[begin : begin + most]
            assert stream.since(position, most) == (found, begin + len(found))
    kept = told[first:]
    for id in range(step + 5):
        same = [i for i, item in enumerate(kept) if item.id == id and not item.kind]
        later = [i for i, item in enumerate(kept) if item.id > id]
        if same:
            expected = first + same[-1] + 1
        elif not kept or id > kept[-1].id:
            expected = 0
        else:
            expected = first + next(iter(later), 0)
        assert stream.after(id) == expected


class Machines:
    """In Ray's place: each node reads the log files of a folder of its own, here and at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def remote(self, label_selector: dict[str, str], **_: Any) -> Any:
        (node,) = label_selector.values()

        def read(pids: list[int], known: dict[str, int]) -> Any:
            return list(job_logs._each_file(self.folder / node, pids, known))

        return lambda _: SimpleNamespace(remote=read)

    def get(self, answer: Any, timeout: float) -> Any:
        return answer


def test_what_was_told_of_one_machine_is_untold_of_another_whose_name_begins_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was told of node10's files was taken for told of node1's."""
    monkeypatch.setattr(job_logs, "ray", Machines(tmp_path))
    hosts = {"a": "node10", "b": "node1"}
    members = [{"worker": f"w{n}", "host": host, "pid": 7} for n, host in enumerate(hosts.values())]
    story = JobStory(str(tmp_path / "run"))
    story.events.add(Item(0, {"members": members}))
    reader, name = job_logs.JobLogs(story), "worker-x-7.out"
    for node, text in (("a", "of the tenth\n" * 3), ("b", "")):
        (tmp_path / node).mkdir()
        (tmp_path / node / name).write_text(text)
    sight = Sight(hosts=hosts)
    assert [line["who"] for line in reader.read(sight)] == ["w0"] * 3
    (tmp_path / "b" / name).write_text("of the first\n" * 9)
    assert reader.read(sight) == [{"who": "w1", "text": "of the first"}] * 9
    assert reader.read(sight) == []


def test_a_look_at_a_job_asks_nothing_again_of_where_its_folder_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each read the table of mounts, five times a second: that was most of what a job cost."""
    story = JobStory(str(tmp_path))
    story.look()
    asked = "elastic_ft.observe.lines.can_hang"
    monkeypatch.setattr(asked, lambda path: pytest.fail(f"{path} was asked for"))
    (tmp_path / "events.jsonl").write_text('{"event": "x", "generation": 1, "seq": 0}\n')
    (tmp_path / "result.json").write_text('{"status": "completed"}')
    story.look()
    assert story.seq == 0 and story.result["status"] == "completed" and not story.trouble
