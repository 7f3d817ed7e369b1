"""A node's template and its clients, without Ray: whatever breaks, a worker is started, once."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from ray.exceptions import RayError

from elastic_ft.hosts.ray import fork_client, fork_server, local_templates, warm_nodes
from elastic_ft.hosts.ray.cluster import wait_for
from elastic_ft.hosts.ray.fork_server import Request
from elastic_ft.hosts.ray.local_templates import LocalTemplates
from elastic_ft.hosts.ray.warm_nodes import Template, WarmNodes

ASKED = ["worker.py", "--node-id=n"]
WAIT_S = 30.0


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "sockets"
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(fork_client, "FOLDER", str(folder))
    monkeypatch.setattr(fork_server, "FIRST", os.environ)
    return folder


@pytest.fixture
def served() -> Iterator[SimpleQueue[Request | None]]:
    """What came of each that was answered, by a template of this process."""
    found: SimpleQueue[Request | None] = SimpleQueue()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(fork_client.name_of("n"))
    listener.listen()

    def serve() -> None:
        while True:
            try:
                link, _ = listener.accept()
            except OSError:
                return
            with link:
                found.put(fork_server.answer_client(link))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield found
    listener.shutdown(socket.SHUT_RDWR)
    thread.join(WAIT_S)
    listener.close()


def open_files() -> list[str]:
    """What they are. In this process other tests' threads open and close some, too."""
    found = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(str(path.readlink()))
    return found


def test_the_forked_process_says_that_it_is_there(
    served: SimpleQueue[Request | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fork", lambda: 0)
    assert fork_client.ask_template(ASKED)
    request = served.get(timeout=WAIT_S)
    assert request is not None and request.argv == ASKED and len(request.streams) == 3
    for stream in request.streams:
        os.close(stream)


def no_room() -> int:
    raise BlockingIOError("no more processes")


@pytest.mark.parametrize("fork", [no_room, lambda: 4711])
def test_a_fork_that_comes_to_nothing_is_seen(
    served: SimpleQueue[Request | None], monkeypatch: pytest.MonkeyPatch, fork: Callable[[], int]
) -> None:
    """None is made, or it ends before it is a worker: its client took it for one, and Ray waited
    for it."""
    monkeypatch.setattr(os, "fork", fork)
    standard = {str(Path(f"/proc/self/fd/{number}").readlink()) for number in range(3)}
    before = [name for name in open_files() if name in standard]
    assert not fork_client.ask_template(ASKED)
    assert served.get(timeout=WAIT_S) is None
    assert [name for name in open_files() if name in standard] == before


def test_a_forked_process_that_stands_still_is_not_waited_for(
    served: SimpleQueue[Request | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client waited for ever. It starts Python itself by now: the other one must not be there
    beside it, should it ever go on."""
    stood, goes_on = threading.Event(), threading.Event()
    codes, confirm = list[int](), fork_server.confirm

    def stopped(link: socket.socket) -> None:
        stood.set()
        assert goes_on.wait(WAIT_S)
        confirm(link)

    monkeypatch.setattr(fork_client, "WAIT_S", 0.2)
    monkeypatch.setattr(fork_client, "LOOK_S", 0.1)
    monkeypatch.setattr(os, "fork", lambda: 0)
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(fork_server, "confirm", stopped)
    asked = SimpleQueue[bool]()
    asking = lambda: asked.put(fork_client.ask_template(ASKED))  # noqa: E731
    threading.Thread(target=asking, daemon=True).start()
    assert stood.wait(WAIT_S)
    try:
        assert not asked.get(timeout=WAIT_S)
    finally:
        goes_on.set()
    request = served.get(timeout=WAIT_S)
    assert codes == [1]
    assert request is not None
    for stream in request.streams:
        os.close(stream)


STOPS_BEFORE_IT_FORKS = """
import os, signal, socket, sys
listener = socket.socket(fileno=int(sys.argv[1]))
listener.listen()
while True:
    link, _ = listener.accept()
    if link.recv(1 << 20):
        break
link.sendall(b'+')
link.recv(1)
os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_a_template_that_is_stopped_as_it_forks_is_not_waited_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After both have said that they go on: only the end of its process ended that wait."""
    monkeypatch.setattr(fork_client, "LOOK_S", 0.05)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(fork_client.name_of("n"))
        program = [sys.executable, "-S", "-c", STOPS_BEFORE_IT_FORKS, str(listener.fileno())]
        said = SimpleQueue[bool]()
        with subprocess.Popen(program, pass_fds=[listener.fileno()]) as process:
            wait_for(lambda: is_listened_to("n"), WAIT_S, "it listens")
            asking = lambda: said.put(fork_client.ask_template(ASKED))  # noqa: E731
            threading.Thread(target=asking, daemon=True).start()
            try:
                assert not said.get(timeout=WAIT_S)
                assert psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
            finally:
                process.kill()


@pytest.mark.parametrize("said", [b"", b"{}", b"[1]", b"no json"])
def test_streams_of_what_is_refused_are_closed(said: bytes) -> None:
    ours, theirs = os.pipe()
    pipe = str(Path(f"/proc/self/fd/{ours}").readlink())
    here, there = socket.socketpair()
    with here, there:
        size = len(said) or fork_server.REQUEST_MAX + 1
        socket.send_fds(there, [size.to_bytes(4, "big")], [ours, theirs, theirs])
        os.close(ours)
        os.close(theirs)
        there.sendall(said)
        assert fork_server.answer_client(here) is None
    assert pipe not in open_files()


def test_a_folder_that_others_can_look_into_is_not_used(
    served: SimpleQueue[Request | None], folder: Path
) -> None:
    folder.chmod(0o755)
    with pytest.raises(PermissionError, match="nobody else"):
        fork_client.ask_template(ASKED)
    assert served.empty()


def test_a_local_node_starts_cold_where_the_folder_is_not_ours_alone(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever had made it kept every local cluster from starting, and its first raylet was left."""
    monkeypatch.setattr(local_templates, "TERM_S", 0.0)
    folder.chmod(0o755)
    templates = LocalTemplates({}, tmp_path / "log")
    try:
        templates.add("n", 1)
        assert templates.processes("n") == []
    finally:
        templates.close()
    (record,) = caplog.records
    assert "start cold on node n" in record.message and "nobody else can look" in record.message


def test_nobody_waits_for_a_template_that_can_not_load(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process waited for half a minute. It is tried again, and what is left of others goes."""
    over = threading.Event()

    def sleep(seconds: float) -> None:
        if seconds == warm_nodes.AGAIN_S:  # its child has ended, with this test
            over.set()
            threading.Event().wait()

    monkeypatch.setattr(warm_nodes, "time", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(warm_nodes, "fork_server", SimpleNamespace(__name__="loads_later"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(folder / "other"))
    template = Template("n")
    wait_for(lambda: not template.where(), WAIT_S, "it can't load")
    with pytest.raises(OSError):
        while True:  # beside a load that is tried again
            assert not fork_client.ask_template(ASKED)
    (tmp_path / "loads_later.py").write_text(
        "import os, sys\nos.write(int(sys.argv[2]), b'+')\nsys.stdin.read()\n"
    )
    wait_for(lambda: bool(template.where()), WAIT_S, "it has loaded")
    assert [path.name for path in folder.iterdir()] == ["n"]
    (child,) = (p for p in psutil.Process().children() if "loads_later" in p.cmdline())
    child.kill()
    assert over.wait(WAIT_S)


def test_a_socket_that_was_left_half_made_bars_nobody(folder: Path) -> None:
    """Each template there failed as it began, for good."""
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(folder / f"n{warm_nodes.NEW}"))
    for _ in range(2):
        warm_nodes.listener_for("n").close()
    assert [path.name for path in folder.iterdir()] == ["n"]


def test_a_template_that_can_not_be_started_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread ended with the first OSError, and the actor lived on as if it kept one."""
    tries, over = list[int](), threading.Event()

    def sleep(seconds: float) -> None:
        if len(tries) == 2:
            over.set()
            threading.Event().wait()

    def start(*command: Any, **how: Any) -> None:
        tries.append(1)
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(warm_nodes, "time", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(warm_nodes.subprocess, "Popen", start)
    template = Template("n")
    assert over.wait(WAIT_S)
    assert template.where() == ""


LISTENS = """
import os, socket, sys
socket.socket(fileno=int(sys.argv[1])).listen()
os.write(int(sys.argv[2]), b'+')
sys.stdin.read()
"""


def test_a_template_that_is_stopped_is_not_waited_for_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever was to be forked waited for half a minute, the next controller among them."""
    monkeypatch.setattr(warm_nodes, "fork_server", SimpleNamespace(__name__="listens"))
    monkeypatch.setattr(fork_client, "WAIT_S", 1e6)
    looks, over = threading.Event(), threading.Event()
    ends: list[float] = []

    def sleep(seconds: float) -> None:
        ends.append(seconds)
        if len(ends) > 1:  # the second child's, with this test
            over.set()
            threading.Event().wait()

    monkeypatch.setattr(warm_nodes, "time", SimpleNamespace(sleep=sleep))
    await_end = warm_nodes._await_end

    def look(process: Any) -> int:
        looks.wait()
        monkeypatch.setattr(warm_nodes, "LOOK_STOPPED_S", 0.01)
        return await_end(process)

    monkeypatch.setattr(warm_nodes, "_await_end", look)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "listens.py").write_text(LISTENS)

    template = Template("n")
    wait_for(lambda: bool(children("listens")) and bool(template.where()), WAIT_S, "it has loaded")
    (stopped,) = children("listens")
    wait_for(lambda: listens_at("n") == stopped.pid, WAIT_S, "it listens")
    stopped.suspend()
    with pytest.raises(TimeoutError, match="stands still"):
        fork_client.ask_template(ASKED)
    looks.set()
    wait_for(lambda: not stopped.is_running(), WAIT_S, "it is killed")
    wait_for(
        lambda: listens_at("n") in [p.pid for p in children("listens")], WAIT_S, "another listens"
    )
    children("listens")[0].kill()
    assert over.wait(WAIT_S)


STOPS_ONCE = """
import os, pathlib, signal, sys
if not (before := pathlib.Path(__file__).with_name("before")).exists():
    before.touch()
    os.kill(os.getpid(), signal.SIGSTOP)
os.write(int(sys.argv[2]), b'+')
sys.stdin.read()
"""


def test_a_template_that_is_stopped_while_it_loads_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its actor waited for it for ever, and each process half a minute."""
    over, pauses = threading.Event(), list[float]()

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) > 1:  # the second child's, with this test
            over.set()
            threading.Event().wait()

    monkeypatch.setattr(warm_nodes, "time", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(warm_nodes, "fork_server", SimpleNamespace(__name__="stops_once"))
    monkeypatch.setattr(warm_nodes, "LOOK_STOPPED_S", 0.01)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "stops_once.py").write_text(STOPS_ONCE)
    template = Template("n")
    try:
        wait_for(lambda: bool(pauses) and bool(template.where()), WAIT_S, "another one loads")
    finally:
        for child in children("stops_once"):
            child.kill()
    assert over.wait(WAIT_S)
    assert pauses[0] == warm_nodes.LOAD_AGAIN_S


def children(module: str) -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if module in process.cmdline():
                found.append(process)
    return found


def is_listened_to(node: str) -> bool:
    try:
        return bool(listens_at(node))
    except ConnectionRefusedError:
        return False


def listens_at(node: str) -> int:
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(fork_client.name_of(node))
        return fork_client.listener_of(link)


def test_what_a_node_says_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that answered too late was cold for ever."""
    answers: list[Future[str]] = []

    def ask(actor: Any) -> Future[str]:
        answers.append(Future())
        return answers[-1]

    monkeypatch.setattr(warm_nodes, "_template_on", lambda node: node)
    monkeypatch.setattr(warm_nodes, "_ask", ask)
    monkeypatch.setattr(warm_nodes, "ANSWER_TIMEOUT_S", 5.0)
    nodes = ["a"]
    warm = WarmNodes(lambda: nodes)
    warm.look(0.0)
    warm.look(10.0)
    assert warm.executable() == ""
    answers[0].set_result("fork")
    warm.look(20.0)
    assert warm.executable() == "fork" and len(answers) == 2
    answers[1].set_result("")  # its template can't load any more
    warm.look(21.0)
    assert warm.executable() == ""
    warm.look(40.0)
    answers[2].set_exception(RayError("its node is gone"))
    warm.look(41.0)
    assert warm.executable() == ""
    nodes[:] = ["b"]
    warm.look(42.0)
    answers[-1].set_result("fork")
    warm.look(43.0)
    assert warm.executable() == "fork"
