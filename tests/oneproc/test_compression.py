"""Bytes saved between ranks: what is rounded, what is owed, and that none of it gets lost."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from elastic_ft.config import CommConfig
from elastic_ft.core.assignment import Tier
from elastic_ft.core.intervals import Cadence
from elastic_ft.core.sharding import Box, Piece, place
from elastic_ft.engines import replica_comm
from elastic_ft.engines.int8 import BLOCK, pack_blocks, unpack_blocks
from elastic_ft.engines.replica_comm import ReplicaComm
from elastic_ft.errors import CheckpointMismatch, GroupBroken
from elastic_ft.keeper.buffer import DIGEST_BYTES, Slot, seal
from elastic_ft.state import residuals
from elastic_ft.state.placed import Placed
from elastic_ft.state.residuals import PARTS, residual_of, settle_residuals, summed_residuals
from elastic_ft.state.tensors import LocalState, StateTensor
from elastic_ft.state.transfer import move
from elastic_ft.worker.loop import Loop
from elastic_ft.worker.restore import read_boxes
from tests.oneproc.alone import attached, job_of, run_step
from tests.oneproc.test_transfer import DEADLINE_S, Network, Participant

SHAPE = (7, 5)
A, B = "pp0.s0.tp0", "pp0.s1.tp0"


def test_int8_is_off_by_half_a_scale_at_most() -> None:
    rows = torch.randn(3, 2 * BLOCK + 9, generator=torch.Generator().manual_seed(0)) * 1e-3
    rows[1, :BLOCK] = 0.0
    codes = pack_blocks(rows)
    assert codes.dtype is torch.uint8
    assert codes.numel() == 3 * 3 * (BLOCK + 4)
    found = unpack_blocks(codes, rows.shape[1])
    scale = rows.abs().max() / 127
    assert (found - rows).abs().max() <= 0.501 * scale
    assert not found[1, :BLOCK].any()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so(value: float) -> None:
    rows = torch.ones(1, BLOCK + 1)
    rows[0, 3] = value
    found = unpack_blocks(pack_blocks(rows), BLOCK + 1)
    assert not found[0, 3].isfinite()
    assert found[0, BLOCK] == 1.0


# ------------------------------------------------------------------ as the world changes


class Member(Participant):
    """What ``summed`` uses of Groups. ``told``: of all participants, by number."""

    def __init__(self, network: Network, number: int, has: dict[str, Tier]) -> None:
        super().__init__(network, number)
        self.assignment = SimpleNamespace(has=has)
        self.told: list[Any] = []

    def exchange_values(self, name: str, value: Any, timeout_s: float) -> list[Any]:
        return self.told

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        return super().send([tensors[0].view(torch.uint8)], peer, tag)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        return super().recv([tensors[0].view(torch.uint8)], peer, tag)


def state_of(seed: int, parts: int) -> LocalState:
    made = torch.Generator().manual_seed(seed)
    values = {
        "model.w": torch.zeros(SHAPE),
        residual_of("w"): torch.randn(SHAPE, generator=made),
        residual_of("b"): torch.randn(1, generator=made),
        PARTS: torch.tensor(parts),
    }
    return {
        name: StateTensor(tuple(value.shape), Box.whole(tuple(value.shape)), value)
        for name, value in values.items()
    }


Held = dict[str, tuple[Tier, LocalState]]  # by shard


def sum_of(*everyones: Held) -> list[tuple[list[LocalState], str]]:
    """What each participant finds."""
    network = Network()
    members = [
        Member(network, number, {shard: tier for shard, (tier, _) in held.items()})
        for number, held in enumerate(everyones)
    ]
    offers = [[held[shard][1] for shard in sorted(held)] for held in everyones]
    for member, mine in zip(members, offers, strict=True):  # as each tells the others
        spy: list[Any] = []
        member.exchange_values = lambda name, value, timeout_s, spy=spy: (spy.append(value), [])[1]  # type: ignore[method-assign]
        summed_residuals(member, mine)  # type: ignore[arg-type]
        for other in members:
            other.told.append(spy[0])
    for member in members:
        del member.exchange_values
    with ThreadPoolExecutor(len(members)) as threads:
        runs = [
            threads.submit(summed_residuals, *pair) for pair in zip(members, offers, strict=True)
        ]  # type: ignore[arg-type]
        return [run.result(DEADLINE_S) for run in runs]


def values(state: LocalState) -> torch.Tensor:
    return torch.cat([state[residual_of(name)].local.flatten() for name in ("b", "w")])


@pytest.mark.parametrize("tiers", [(Tier.LIVE,) * 3, (Tier.LIVE, Tier.HOST, Tier.LIVE)])
def test_survivors_and_joiners_have_the_sum_to_the_last_bit(
    monkeypatch: pytest.MonkeyPatch, tiers: tuple[Tier, ...]
) -> None:
    """In pieces of 10 of 36 numbers, the last of which have less than there are ranks, too."""
    monkeypatch.setattr(residuals, "PIECE", 10 if tiers[1] is Tier.LIVE else 35)
    states = [state_of(seed, 3) for seed in range(3)]
    before = [values(state).clone() for state in states]
    held = [{A: (tier, state)} for tier, state in zip(tiers, states, strict=True)]
    found = sum_of(*held, {})  # and one who has nothing
    total = before[0] + before[1] + before[2]
    for (offer,), lost in found[:3]:
        assert torch.equal(values(offer), total)
        assert int(offer[PARTS].local) == 1
        assert lost == ""
    assert found[3] == ([], "")
    for state, was in zip(states, before, strict=True):  # where it breaks off, nothing has changed
        assert torch.equal(values(state), was)
        assert int(state[PARTS].local) == 3


def test_what_went_with_a_replica_is_said_to_be_lost_and_no_more_than_that() -> None:
    states = [state_of(seed, 3) for seed in range(2)]
    total = values(states[0]) + values(states[1])
    for (offer,), lost in sum_of(*({A: (Tier.LIVE, state)} for state in states)):
        assert torch.equal(values(offer), total)
        assert lost == f"1 of 3 parts for {A}"


def test_who_has_the_sum_gives_it_to_the_others() -> None:
    """Some had shared theirs when a member died, others had not."""
    shared, part = state_of(0, 1), state_of(1, 2)
    for (offer,), lost in sum_of({A: (Tier.LIVE, part)}, {A: (Tier.LIVE, shared)}):
        assert torch.equal(values(offer), values(shared))
        assert lost == ""


def test_shards_are_summed_each_by_itself_and_a_copy_is_no_other_part() -> None:
    states = [state_of(seed, 2) for seed in range(4)]
    copy = {A: (Tier.LIVE, states[1]), B: (Tier.PEER, states[2])}
    found = sum_of({A: (Tier.LIVE, states[0])}, copy, {B: (Tier.HOST, states[2])})
    assert torch.equal(values(found[0][0][0]), values(states[0]) + values(states[1]))
    assert torch.equal(values(found[2][0][0]), values(states[2]))
    assert found[1][0][1].keys() == {"model.w"}
    assert {lost for _, lost in found} == {f"1 of 2 parts for {B}"}


def test_what_went_with_all_holders_of_a_shard_is_said_beside_what_others_have() -> None:
    """Of hsdp 2x2 both that had the second shard: a peer's copy is of one of their two parts."""
    states, copy = [state_of(seed, 2) for seed in range(2)], state_of(2, 2)
    held = {A: (Tier.LIVE, states[0])}, {A: (Tier.LIVE, states[1]), B: (Tier.PEER, copy)}
    for found, lost in sum_of(*held):
        assert int(found[0][PARTS].local) == 1
        assert lost == f"1 of 2 parts for {B}"


def test_what_all_have_the_sum_of_is_not_copied() -> None:
    states = [state_of(seed, 1) for seed in range(2)]
    found = sum_of(*({A: (Tier.LIVE, state)} for state in states))
    for ((offer,), lost), state in zip(found, states, strict=True):
        assert offer is state
        assert lost == ""


def test_a_sum_has_the_dtypes_of_its_parts() -> None:
    """float64 beside float32: a transfer counts bytes."""
    states = [state_of(seed, 2) for seed in range(2)]
    for state in states:
        wide = state[residual_of("b")]
        state[residual_of("b")] = replace(wide, local=wide.local.double())  # type: ignore[index]
    for (offer,), _ in sum_of(*({A: (Tier.LIVE, state)} for state in states)):
        assert [offer[key].dtype for key in states[0]] == [t.dtype for t in states[0].values()]


def test_a_copy_that_is_all_there_is_counts_once() -> None:
    state, other = state_of(0, 4), state_of(0, 4)
    assert settle_residuals(state, "") == "3 of 4 parts"
    assert settle_residuals(other, "1 of 4 parts") == "1 of 4 parts"
    assert int(state[PARTS].local) == int(other[PARTS].local) == 1
    assert settle_residuals(state, "") == ""
    assert settle_residuals({}, "") == ""


# --------------------------------------------------------------------------- in a step


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 2, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        return self.line(x).square().sum(), len(x)


OWED = residual_of("line.weight")
PLAIN = {"name": "sgd", "lr": 0.5, "grad_clip": None, "schedule": "constant", "weight_decay": 0.0}


def line_job(**optimizer: Any) -> Any:
    comm = {"compress_replicas": "int8"}
    return job_of(
        comm=comm, optimizer=PLAIN | optimizer, elastic={"max_workers": 1, "min_workers": 1}
    )


def test_who_has_no_replicas_pays_what_is_owed_at_once() -> None:
    batch = [torch.ones(4, 3)]
    after = []
    for owed in (0.0, 0.25):
        with attached(line_job(), Line) as engine:
            engine.state()[OWED].local.fill_(owed)
            run_step(engine, 1, batch)
            after.append(engine.state()["model.line.weight"].local.clone())
            assert not engine.state()[OWED].local.any()
    assert torch.allclose(after[0] - after[1], torch.full((2, 3), 0.5 * 0.25), atol=1e-6)


def test_a_step_that_is_skipped_owes_what_the_one_before_did() -> None:
    with attached(line_job(skip_nonfinite=1), Line) as engine:
        engine.state()[OWED].local.fill_(0.25)
        _, _, update = run_step(engine, 1, [torch.full((4, 3), math.inf)])
        assert update.skipped
        assert (engine.state()[OWED].local == 0.25).all()


def test_a_checkpoint_may_lack_residuals_and_have_them_for_nothing() -> None:
    """``comm`` may change between two starts; whatever else differs is refused."""
    with attached(line_job(), Line) as engine:
        state = dict(engine.state())
        state[OWED].local.fill_(1.0)
        plain = {key: tensor for key, tensor in state.items() if not key.startswith("comm.")}
        read_boxes(stored(plain), state, state, frozenset())
        assert not state[OWED].local.any()
        assert settle_residuals(state, "") == ""
        read_boxes(stored(state), plain, plain, frozenset())
        with pytest.raises(CheckpointMismatch, match=r"model\.line\.weight is absent"):
            read_boxes(stored({OWED: state[OWED]}), plain, plain, frozenset())


class Stored:
    """A checkpoint of the model alone, as one more holder."""

    is_far, holder = True, "a"

    def __init__(self) -> None:
        self.schema = (Slot("model.w", "float32", SHAPE, Box.whole(SHAPE), 0, 0),)

    def read(self, parts: Iterable[tuple[str, Box]]) -> bytes:
        held = torch.full(SHAPE, 3.0)
        said = b"".join(
            held[box.slices_within(Box.whole(SHAPE))].numpy().tobytes() for _, box in parts
        )
        buffer = np.frombuffer(said + bytes(DIGEST_BYTES), np.uint8).copy()
        seal(buffer)
        return buffer.tobytes()


class Meeting(Participant):
    """Two of them: all that one tells, the other hears."""

    barrier, told = threading.Barrier(2), dict[tuple[str, int], bytes]()

    def exchange(self, name: str, value: bytes, timeout_s: float) -> list[bytes]:
        self.told[name, self.participant] = value
        self.barrier.wait(DEADLINE_S)
        return [self.told[name, number] for number in range(2)]


def half(number: int, value: float) -> LocalState:
    box = Box((4 * number, 0), (4 - number, 5))
    state = {
        name: StateTensor(SHAPE, box, torch.full(box.sizes, value))
        for name in ("model.w", residual_of("w"))
    }
    return state | {PARTS: StateTensor((), Box((), ()), torch.ones((), dtype=torch.int64))}


def test_what_a_checkpoint_does_not_say_is_owed_is_nothing_for_all() -> None:
    """Just resumed from it by a job that compresses, half of whose members are lost at once."""
    offer, needs = half(0, 0.0), [half(0, 5.0), half(1, 5.0)]
    pieces = [
        [Piece(str(number), name, tensor.box) for number, state in said for name, tensor in state]
        for said in ([(0, offer.items())], [(n, state.items()) for n, state in enumerate(needs)])
    ]
    sizes = {"model.w": 4, residual_of("w"): 4, PARTS: 8}
    placed = Placed(place(pieces[0]), place(pieces[1]), sizes, {})
    network = Network()

    def one(number: int) -> int:
        offers = [] if number else [offer]
        return move(Meeting(network, number), placed, offers, needs[number], [Stored()])  # type: ignore

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(one, range(2)))
    for state, value in zip(needs, (0.0, 3.0), strict=True):
        assert (state["model.w"].local == value).all()
        assert not state[residual_of("w")].local.any()
        assert settle_residuals(state, "") == ""
        assert int(state[PARTS].local) == 1


def stored(state: LocalState) -> Any:
    """A checkpoint of ``state``, as one is read."""

    def read(wanted: list[Any]) -> None:
        for want in wanted:
            raw = state[want.tensor].local.contiguous().view(-1).view(torch.uint8).numpy()
            want.out[:] = memoryview(raw)

    specs = {key: SimpleNamespace(dtype=t.dtype, shape=t.shape) for key, t in state.items()}
    return SimpleNamespace(url="a", manifest=SimpleNamespace(tensors=specs), read=read)


# ----------------------------------------------------------------------- to all replicas


def test_replicas_share_in_pieces_each_of_which_is_progress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one silent exchange it was judged a hang on slow links, again at every checkpoint."""
    monkeypatch.setattr(replica_comm, "PIECE", 4)
    with attached(line_job(), Line) as engine:
        state, told = engine.state(), list[str]()
        engine._model.replicas._replicas = 2  # of whom this rank is the only one that is there
        state[OWED].local.fill_(0.25)
        state[PARTS].local.fill_(2)

        def broken_off() -> None:
            told.append("")
            if len(told) == 2:
                raise GroupBroken("aborted")

        with pytest.raises(GroupBroken):
            engine.share_residuals(broken_off)
        assert int(state[PARTS].local) == 2
        told.clear()
        engine.share_residuals(lambda: told.append(""))
        assert len(told) == 2
        assert int(state[PARTS].local) == 1
        assert (state[OWED].local == 0.25).all()
        engine.share_residuals(lambda: told.append(""))
        assert len(told) == 2


def test_before_a_pause_the_snapshot_is_of_the_sum() -> None:
    """On a GPU it is what a leaver's live state is taken for once that has left the device."""
    done: list[str] = []
    loop: Any = object.__new__(Loop)
    loop.job, loop.cadence = job_of(comm={"compress_replicas": "int8"}), Cadence(None, 0.01, 50)
    loop.holds, loop.stopping, loop._checkpointing = True, False, False
    loop.engine = SimpleNamespace(share_residuals=lambda progress: done.append("share"))
    loop._snapshot = lambda hold, upload: done.append("snapshot")
    for step, loop.pausing in ((3, False), (4, True)):
        assert not loop._keep(step)
    assert done == ["snapshot", "share", "snapshot"]


def powersgd_of(*shapes: tuple[int, ...], rank: int) -> ReplicaComm:
    """Of two replicas, of whom this one is the only one that is there."""
    made = {str(n): nn.Parameter(torch.zeros(shape)) for n, shape in enumerate(shapes)}
    comm = ReplicaComm(CommConfig(compress_replicas="powersgd", powersgd_rank=rank), made)
    comm._replicas = 2
    for parameter in made.values():
        parameter.grad = torch.ones_like(parameter)
    return comm


@pytest.mark.parametrize(("shape", "rank"), [((64, 64), 64), ((4, 512), 4)])
def test_where_no_matrix_is_worth_it_all_are_sent_as_they_are(
    shape: tuple[int, ...], rank: int
) -> None:
    with attached(line_job(), Line):
        comm = powersgd_of(shape, rank=rank)
        comm.reduce()
        comm.commit()
    (parameter,), (residual,) = comm._parameters.values(), comm._residuals.values()
    assert parameter.grad is not None
    assert (parameter.grad == 0.5).all()
    assert not residual.any()


def test_gradients_are_exchanged_some_parameters_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """All at once took several times the gradients' memory."""
    sizes: list[int] = []
    summing = dist.all_reduce
    monkeypatch.setattr(replica_comm, "TOGETHER", 1000)
    with attached(line_job(), Line):
        comm = powersgd_of((20, 40), (5, 20), (20, 90), (3,), rank=2)

        def counted(tensor: Tensor, **kwargs: Any) -> Any:
            sizes.append(tensor.numel())
            return summing(tensor, **kwargs)

        monkeypatch.setattr(dist, "all_reduce", counted)
        comm.reduce()
        comm.commit()
    # P and then Q of each matrix: 900 numbers, 1800, and 3 that are sent as they are
    assert sizes == [20 * 2 + 5 * 2, 40 * 2 + 20 * 2, 20 * 2, 90 * 2, 3]
    assert comm._factors.keys() == {"0", "1", "2"}
    for parameter in comm._parameters.values():
        assert parameter.grad is not None
        assert torch.allclose(parameter.grad, torch.full_like(parameter.grad, 0.5))
