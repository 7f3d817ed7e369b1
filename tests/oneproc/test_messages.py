"""What messages carry, and what is refused: each is itself on arrival, or is no message."""

from __future__ import annotations

import contextlib
import typing
import zlib
from random import Random
from typing import Any, get_args

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ft.core import commands as cmd
from elastic_ft.core import events as ev
from elastic_ft.core.assignment import Assignment, Holding, Keeper, Member, Source, Tier
from elastic_ft.core.layouts.layout import Layout
from elastic_ft.core.sharding import Box
from elastic_ft.core.shares import shares
from elastic_ft.faults import PointFault
from elastic_ft.keeper.buffer import Slot
from elastic_ft.keeper.protocol import FROM_KEEPER, TO_KEEPER, Content, Read, Sealed
from elastic_ft.transport.control import (
    TO_CONTROLLER,
    TO_WORKER,
    Form,
    Heartbeat,
    Welcome,
    forms,
    to_each,
)
from elastic_ft.transport.messages import (
    COMPRESSED,
    UNPACKED_BYTES_MAX,
    MessageRefused,
    Messages,
    Packed,
    encode,
    pack,
)
from tests.multiproc.harness import make_job
from tests.oneproc.test_wire import PINGS, Ping

SLOT = Slot("a", "float32", (8, 3), Box((0, 0), (4, 3)), 0, 48)
HOLDING = Holding(7, "pp1.s2.tp1", "pp0.s0.tp0", Tier.KEEPER)
MEMBER = Member("w0", "n0", "host", 1, None, "rack", 80 << 30)
ASSIGNMENT = Assignment(
    3,
    (MEMBER,),
    (),
    Layout(),
    Source(7, Tier.PEER, "s", {"a": (("w0", Tier.PEER),)}),
    ((),),
    "why",
    (Keeper("n0", ("10.0.0.1", 4)),),
)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (TO_CONTROLLER, ev.StepApplied(1.5, "w0", 3, 8, {"loss": 0.1, "ids": [1, 2]}, 0.5)),
        (TO_CONTROLLER, ev.Paused(1.0, "w0", 3, (HOLDING,))),
        (TO_CONTROLLER, Heartbeat("w0", 1, 2, 3, "forward")),
        (TO_CONTROLLER, ev.ShardsWritten(1.0, "w0", 3, 8, ({"file": "x"},), {"a": ("f", (2,))})),
        (TO_WORKER, Welcome(make_job(), "run", "url", ("h", 1), (PointFault("forward"),))),
        (TO_WORKER, Form(dict(shares(ASSIGNMENT))["w0"], {"rank": 0}, frozenset({1, 2}), 5)),
        (TO_WORKER, cmd.PauseWorkers(3, ("w0", "w1"), True, "why")),
        (TO_KEEPER, Sealed("/p", HOLDING, (SLOT,), (cmd.RecordStep(7, 3, 2, "l", {"loss": 1.0}),))),
        (TO_KEEPER, Read("w0", HOLDING, (("a", Box((1,), (2,))),))),
        (FROM_KEEPER, Content(b"\x00\xff")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_message_is_itself_on_arrival(messages: Messages, message: Any) -> None:
    assert messages.decode(encode(message)) == message


def test_every_event_is_told_by_workers_or_by_the_controllers_own_process() -> None:
    """Who adds one decides: what is not listed as a message is refused, and ends its sender."""
    own = {ev.JobStarted, ev.WorkerLost, ev.WorkerHung, ev.NodeLost, ev.NodeDraining, ev.KeeperLost}
    own |= {ev.NobodyMoves}
    own |= {ev.CheckpointCommitted, ev.CheckpointFailed, ev.StopRequested, ev.ResizeRequested}
    own |= {ev.CheckpointDamaged, ev.TimerFired, ev.ControllerChanged}
    own |= {ev.WorkerReturned, ev.KeeperReturned}
    told = {kind for kind in typing.get_args(ev.Event) if TO_CONTROLLER.has(kind)}
    assert told | own == set(typing.get_args(ev.Event)) and not told & own


def test_what_everyone_is_sent_is_packed_once() -> None:
    extras: dict[str, Any] = {"w0": {"rank": 0}}
    ((worker, form),) = forms(ASSIGNMENT, extras, frozenset({2}), 5)
    assert isinstance(form.assignment.source, Packed)
    share = dict(shares(ASSIGNMENT))[worker]
    assert TO_WORKER.decode(encode(form)) == Form(share, extras["w0"], frozenset({2}), 5)


def test_what_each_is_sent_does_not_grow_with_the_world() -> None:
    """All of them lose one: a pause and a generation are O(N) bytes in all."""
    sizes: dict[str, set[int]] = {"form": set(), "pause": set()}
    for count in (100, 800):
        workers = [f"w{1000 + rank}" for rank in range(count)]
        members = tuple(Member(w, f"n{w}", "host", 1) for w in workers)
        layout = Layout(dp_shard=count)
        held = {layout.shard_of(r): ((w, Tier.LIVE),) for r, w in enumerate(workers)}
        source = Source(7, Tier.LIVE, layout.shard_space, held)
        buddies = tuple(((rank + 1) % count,) for rank in range(count))
        keepers = tuple(Keeper(m.node, ("10.0.0.1", 4)) for m in members)
        made = Assignment(3, members, (), layout, source, buddies, "a loss", keepers)
        sizes["form"] |= {len(encode(form)) for _, form in forms(made, {})}
        pause = cmd.PauseWorkers(3, tuple(workers), True, "w1 is lost")
        sizes["pause"].add(len(to_each(pause).body))
    assert max(sizes["form"]) < 500
    assert max(sizes["form"]) - min(sizes["form"]) < 20  # digits of ranks
    assert len(sizes["pause"]) == 1 and max(sizes["pause"]) < 200


def test_a_field_of_a_later_version_is_left_out_and_one_of_an_older_has_its_default() -> None:
    later = pack(["Ping", {"number": 1, "payload": b"", "extra": {}, "colour": "red"}])
    assert PINGS.decode(later) == PINGS.decode(pack(["Ping", {"number": 1}])) == Ping(1)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (None, "no message"),
        (["Pong", {}], "'Pong' is no message for this process"),
        (["Ping", {}], "Ping: .*number"),
        (["Ping", {"number": "1"}], "Ping.number: expected int, found str"),
        (["Ping", {"number": True}], "Ping.number: expected int, found bool"),
        (["Ping", {"number": 1, "extra": {"a": b"bytes"}}], "Ping.extra: expected a plain value"),
        (["Ping", [1]], "expected the fields of Ping"),
    ],
)
def test_what_is_no_message_is_refused_in_one_line(value: Any, why: str) -> None:
    with pytest.raises(MessageRefused, match=why) as caught:
        PINGS.decode(pack(value))
    assert "\n" not in str(caught.value)


def test_a_message_that_unpacks_to_too_much_is_refused() -> None:
    bomb = msgpack.ExtType(COMPRESSED, zlib.compress(bytes(UNPACKED_BYTES_MAX + 9), 1))
    with pytest.raises(MessageRefused, match="too large"):
        PINGS.decode(msgpack.packb(["Ping", bomb]))


BODIES = [
    (messages, encode(message))
    for messages, message in (
        (TO_CONTROLLER, ev.StepApplied(1.5, "w0", 3, 8, {"loss": 0.1, "ids": [1, 2]}, 0.5)),
        (TO_CONTROLLER, ev.Paused(1.0, "w0", 3, (HOLDING,))),
        (TO_WORKER, Form(Packed(ASSIGNMENT), {"rank": 0}, frozenset({1}), 5)),  # type: ignore[arg-type]
        (TO_WORKER, Welcome(make_job(), "run", "url", ("h", 1), (PointFault("forward"),))),
        (TO_KEEPER, Sealed("/p", HOLDING, (SLOT,), (cmd.RecordStep(7, 3, 2, "l", {}),))),
    )
]


@settings(max_examples=200, deadline=None, database=None)
@given(st.randoms(use_true_random=False), st.sampled_from(BODIES))
def test_any_mutation_is_a_message_or_is_refused(
    random: Random, which: tuple[Messages, bytes]
) -> None:
    messages, body = which
    for _ in range(50):
        mutated = bytearray(body)
        for _ in range(random.randint(1, 4)):
            at, new = random.randrange(len(mutated) + 1), random.randbytes(random.randint(0, 4))
            mutated[at : at + random.choice((0, 1, len(new), 40))] = new
        with contextlib.suppress(MessageRefused):
            messages.decode(bytes(mutated))


MADE_HERE = (  # by the controller and its host
    *(ev.JobStarted, ev.StopRequested, ev.ResizeRequested, ev.TimerFired, ev.ControllerChanged),
    *(ev.WorkerLost, ev.WorkerHung, ev.NodeLost, ev.NodeDraining, ev.KeeperLost, ev.NobodyMoves),
    *(ev.CheckpointCommitted, ev.CheckpointDamaged, ev.CheckpointFailed),
    *(ev.WorkerReturned, ev.KeeperReturned),
)


@pytest.mark.parametrize("kind", get_args(ev.Event), ids=lambda kind: kind.__name__)
def test_the_controller_takes_every_event_that_it_does_not_make_itself(kind: type) -> None:
    """A kind that was left out would be refused, and who sent it for a stranger."""
    body = msgpack.packb([kind.__name__, {}])
    with pytest.raises(MessageRefused) as refused:
        TO_CONTROLLER.decode(body)
    assert ("is no message for this process" in str(refused.value)) == (kind in MADE_HERE)
