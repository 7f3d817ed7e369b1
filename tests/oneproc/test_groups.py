"""What the groups of a generation cut when they are aborted, and what they leave alone.

Addresses of the loopback network stand for machines: a port's number means another server on each.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from elastic_ft.core.assignment import Assignment, Member, Source, Tier
from elastic_ft.core.layouts.layout import Layout
from elastic_ft.core.shares import shares
from elastic_ft.errors import GroupBroken
from elastic_ft.groups.groups import OTHERS_TIMEOUT_S, Groups
from elastic_ft.groups.store_links import Address, SealedStore, StoreLinks, inet_sockets

KEY = b"k" * 32
ELSEWHERE = "127.0.0.77"


@pytest.fixture
def pair() -> Iterator[list[Groups]]:
    """Two donors' groups: the host group alone, which is no global of torch's."""
    donors = tuple(Member(f"w{i}", f"n{i}", "localhost", 1) for i in range(2))
    assignment = Assignment(1, (), donors, Layout(), Source(0, Tier.INITIAL), (), "a test")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    address = ("127.0.0.1", store.port)
    formed = [
        Groups(share, donor, StoreLinks(address, 10.0, KEY))
        for donor, (_, share) in zip(donors, shares(assignment), strict=True)
    ]
    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(g.form, torch.device("cpu"), 10.0) for g in formed]:
            done.result(30)
    yield formed
    for each in formed:
        each.abort("the end")


@contextlib.contextmanager
def connected(address: Address) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection to a server at ``address``, in this process."""
    with (
        socket.create_server(address) as server,
        socket.create_connection(address, 30) as near,
        server.accept()[0] as far,
    ):
        near.settimeout(30)
        far.settimeout(30)
        yield near, far


def speak(near: socket.socket, far: socket.socket) -> None:
    for one, other in ((near, far), (far, near)):
        one.sendall(b"still here")
        assert other.recv(100) == b"still here"


def test_a_connection_to_the_same_port_number_elsewhere_is_not_cut(pair: list[Groups]) -> None:
    """The controller's port may have the number of some peer's Gloo listener."""
    listeners = pair[0]._gloo_listeners
    assert listeners, "nothing is tested without Gloo's listeners"
    assert ELSEWHERE not in {ip for ip, _ in listeners}
    with contextlib.ExitStack() as stack:
        links = [stack.enter_context(connected((ELSEWHERE, port))) for _, port in listeners]
        pair[0].abort("a worker joins")
        for near, far in links:
            speak(near, far)


def test_everybody_knows_who_the_others_are_and_where(pair: list[Groups]) -> None:
    for groups in pair:
        assert [(peer.worker, peer.node) for peer in groups.peers] == [("w0", "n0"), ("w1", "n1")]


def test_strangers_cost_no_descriptor_once_groups_have_formed(pair: list[Groups]) -> None:
    listeners = sorted(pair[0]._gloo_listeners)
    assert listeners, "nothing is tested without Gloo's listeners"
    before = len(list(inet_sockets()))
    for listener in listeners:
        with pytest.raises(OSError), socket.create_connection(listener, 0.2):
            pass
    assert len(list(inet_sockets())) == before
    work = pair[1].host.recv([got := torch.zeros(4)], 0, 7)
    pair[0].wait(pair[0].host.send([torch.ones(4)], 1, 7))
    pair[1].wait(work)
    assert got.tolist() == [1.0] * 4


def test_an_abort_ends_what_a_peer_waits_for(pair: list[Groups]) -> None:
    with ThreadPoolExecutor(1) as thread:
        work = pair[1].host.recv([torch.zeros(4)], 0, 7)
        received = thread.submit(pair[1].wait, work)
        pair[0].abort("fenced")
        with pytest.raises(GroupBroken, match="onnection closed"):
            received.result(30)


def test_who_waits_for_a_peer_to_connect_is_ended_by_an_abort(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where Gloo listens for a peer that is lost there is no socket to be shut down."""
    waits, let_go = threading.Event(), threading.Event()

    def connect(*_: object) -> None:
        waits.set()
        let_go.wait(60)

    monkeypatch.setattr(dist, "ProcessGroupGloo", connect)
    donors = tuple(Member(f"w{i}", f"n{i}", "localhost", 1) for i in range(2))
    assignment = Assignment(1, (), donors, Layout(), Source(0, Tier.INITIAL), (), "a test")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    links = StoreLinks(("127.0.0.1", store.port), 10.0, KEY)
    groups = Groups(dict(shares(assignment))["w0"], donors[0], links)
    with ThreadPoolExecutor(1) as thread:
        forming = thread.submit(groups.form, torch.device("cpu"), 10.0)
        assert waits.wait(30)
        groups.abort("w1 is lost")
        ended = futures.wait([forming], 30).done
        let_go.set()
    assert ended
    with pytest.raises(GroupBroken, match="w1 is lost"):
        forming.result()
    groups.teardown()
    for left in [thread for thread in threading.enumerate() if thread.name == "connect"]:
        left.join(20)
        assert not left.is_alive()


def test_who_restores_for_long_is_waited_for(pair: list[Groups]) -> None:
    """A part of a checkpoint that comes 10 s later than another's broke the generation."""
    for each in pair:
        each._meet_timeout_s = 0.05
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(pair[0].barrier, "restored", OTHERS_TIMEOUT_S)
        assert not futures.wait([waiting], 0.3).done
        pair[1].barrier("restored", OTHERS_TIMEOUT_S)
        waiting.result(30)
    with pytest.raises(GroupBroken, match="barrier alone"):
        pair[0].barrier("alone")


def test_what_a_stranger_puts_into_the_store_is_refused(pair: list[Groups]) -> None:
    """It takes values from anyone, also before a generation forms; what is read is ours."""
    address = pair[0]._links._address
    stranger = dist.TCPStore(*address, is_master=False)
    stranger.set("g1/boxes/1", b"\x80\x04evil")
    with pytest.raises(GroupBroken, match="g1/boxes/1 was not put there by this job"):
        pair[0].exchange("boxes", b"ours")
    with pytest.raises(GroupBroken, match="was not put there by this job"):
        stranger.set("g1/read/1", stranger.get("g1/boxes/0"))  # ours, and put elsewhere
        pair[0].exchange("read", b"")


def test_what_gloo_puts_into_the_store_is_sealed() -> None:
    donor = Member("w0", "n0", "localhost", 1)
    assignment = Assignment(1, (), (donor,), Layout(), Source(0, Tier.INITIAL), (), "a test")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    links = StoreLinks(("127.0.0.1", store.port), 10.0, KEY)
    groups = Groups(dict(shares(assignment))["w0"], donor, links)
    groups.form(torch.device("cpu"), 10.0)
    of_gloo = [name for name in store.list_keys() if "/host/" in name]
    assert of_gloo
    sealed = SealedStore(store, KEY)
    for name in of_gloo:
        assert sealed.get(name.removeprefix("/"))
        store.set(name, store.get(name)[1:])
        with pytest.raises(ValueError, match="not put there by this job"):
            sealed.get(name.removeprefix("/"))
    groups.abort("the end")


def test_a_world_whose_making_is_ended_leaves_nothing_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A peer is stopped after the first group is there: torch waits for it within its own making
    of the world, which must not come to its end in another generation."""
    waits, let_go, late = threading.Event(), threading.Event(), dist.ProcessGroupGloo

    def connect(*told: object, **more: object) -> object:
        waits.set()
        let_go.wait(60)
        return late(*told, **more)  # the peer goes on

    member = Member("w0", "n0", "localhost", 1)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    links = StoreLinks(("127.0.0.1", store.port), 10.0, KEY)

    def of(generation: int) -> Groups:
        source = Source(0, Tier.INITIAL)
        made = Assignment(generation, (member,), (), Layout(), source, ((),), "a test")
        return Groups(dict(shares(made))["w0"], member, links)

    groups = of(1)
    with ThreadPoolExecutor(1) as thread:
        with monkeypatch.context() as patched:
            patched.setattr(dist.distributed_c10d, "ProcessGroupGloo", connect)
            forming = thread.submit(groups.form, torch.device("cpu"), 10.0)
            assert waits.wait(30)
            groups.abort("w1 is lost")
            ended = futures.wait([forming], 30).done
            if not ended:
                let_go.set()
                futures.wait([forming], 30)
        assert ended
        with pytest.raises(GroupBroken, match="w1 is lost"):
            forming.result()
        groups.teardown()
        following = of(2)
        thread.submit(following.form, torch.device("cpu"), 10.0).result(20)
        world = dist.group.WORLD
        let_go.set()
        for left in [thread for thread in threading.enumerate() if thread.name == "connect"]:
            left.join(20)
            assert not left.is_alive()
        assert dist.group.WORLD is world and dist.get_world_size() == 1
        following.teardown()
    assert dist.distributed_c10d.ProcessGroupGloo is late
