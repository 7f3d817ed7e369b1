"""What users register comes back as it was captured, and nothing that could run does."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from elastic_ft.engines import own_state
from elastic_ft.engines.own_forward import Routed, Whole
from elastic_ft.engines.own_state import Hyper, OwnState
from elastic_ft.errors import ConfigError, GroupBroken
from elastic_ft.worker.odd_ranks import odd_sum

ROOM = 1 << 14


class Thing:
    """Keeps whatever it is given."""

    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def own(**things: Any) -> OwnState:
    state = OwnState(ROOM)
    for name, thing in things.items():
        state.register(name, thing)
    return state


def test_every_kind_of_value_comes_back() -> None:
    values = {
        "none": None,
        "flag": True,
        "count": 1 << 60,
        "rate": 0.1,
        "text": "ä",
        "raw": b"\x00\xff",
        "pair": (1, (2.5, "x")),
        "list": [1, [2, {"deep": (3,)}]],
        "by_number": {3: "three", (1, 2): "a pair"},
        "small": torch.arange(5, dtype=torch.bfloat16),
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "array": np.arange(4, dtype=np.int32).reshape(2, 2),
        "large": torch.arange(1000.0),
    }
    thing = Thing(**copy.deepcopy(values))
    state = own(thing=thing)
    state.capture()
    assert set(state.tensors) == {"user", "user.thing.large"}
    thing.state["large"].zero_()
    thing.state = {}
    state.put_back()
    assert thing.state.keys() == values.keys()
    for name, value in values.items():
        found = thing.state[name]
        assert type(found) is type(value), name
        if isinstance(value, torch.Tensor):
            assert found.dtype == value.dtype and torch.equal(found, value)
        elif isinstance(value, np.ndarray):
            assert found.dtype == value.dtype and (found == value).all()
        else:
            assert found == value


def test_the_state_moves_as_tensors_alone() -> None:
    """As to a joiner: its own objects become those of another process."""
    here = own(thing=Thing(count=5, weights=torch.full((600,), 2.0)))
    there = own(thing=Thing(count=0, weights=torch.zeros(600)))
    here.capture()
    there.capture()
    assert here.sums(3) != there.sums(3)
    for name, tensor in here.tensors.items():
        there.tensors[name].copy_(tensor)
    there.put_back()
    assert there.sums(3) == here.sums(3)
    assert there._objects["thing"].state["count"] == 5
    assert there._objects["thing"].state["weights"].sum() == 1200


def test_what_came_later_is_carried_too_where_there_is_room() -> None:
    thing = Thing(best=None)
    state = own(thing=thing)
    state.capture()
    thing.state = {"best": torch.ones(300)}  # more than what is carried by itself
    state.capture()
    thing.state = {}
    state.put_back()
    assert torch.equal(thing.state["best"], torch.ones(300))
    thing.state = {"history": [0.5] * 4000}
    with pytest.raises(ConfigError, match=r"loop.state_kb: .*thing 3.* there is room for 16,376"):
        state.capture()


class Strange:
    pass


def test_what_cannot_be_carried_is_refused_by_its_path() -> None:
    state = own(thing=Thing(inner={"a": [Strange()]}))
    with pytest.raises(ConfigError, match=r"user.thing.inner.a.0 is Strange, which can't be"):
        state.capture()
    with pytest.raises(ConfigError, match="thing is registered already"):
        state.register("thing", Thing())
    with pytest.raises(ConfigError, match="it is int, which has no state_dict"):
        OwnState(ROOM).register("it", 3)


class Stopping:
    """As early stopping is published: without a state_dict."""

    def __init__(self, trace: Any = print) -> None:
        self.best: float | None = None
        self.counter, self.early_stop, self.trace, self.kind = 0, False, trace, Stopping
        self.seen, self.weights = [1.5], torch.zeros(300)


def test_of_what_has_no_state_dict_the_attributes_are_carried() -> None:
    here, there = Stopping(), Stopping(repr)
    state, other = own(stopping=here), own(stopping=there)
    state.capture()
    other.capture()
    here.best, here.counter, here.early_stop = np.float64(0.25), 3, True
    here.seen.append(2.5)
    here.weights[0] = 1
    state.capture()
    for name, tensor in state.tensors.items():
        other.tensors[name].copy_(tensor)
    other.put_back()
    assert (there.best, there.counter, there.early_stop, there.seen) == (0.25, 3, True, [1.5, 2.5])
    assert there.weights[0] == 1 and there.trace is repr and there.kind is Stopping
    here.counter = 9
    state.put_back()
    assert here.counter == 3


def test_an_attribute_that_cannot_be_carried_is_told_by_its_path() -> None:
    thing = Stopping(nn.Linear(1, 1))  # may be called, and has a state
    with pytest.raises(ConfigError, match=r"user.it.trace is Linear, which can't be"):
        own(it=thing).capture()


def test_ranks_that_differ_are_found_by_name() -> None:
    a = own(same=Thing(x=1), metric=Thing(x=1.0))
    b = own(same=Thing(x=1), metric=Thing(x=2.0))
    a.capture()
    b.capture()
    sums = [a.sums(3), b.sums(3)]
    summed = [float(sum(column)) for column in zip(*sums, strict=True)]
    squared = [float(sum(x * x for x in column)) for column in zip(*sums, strict=True)]
    assert a.names[odd_sum(summed, squared, 2) or 0] == "metric"
    assert odd_sum([2.0 * x for x in a.sums(3)], [2.0 * x * x for x in a.sums(3)], 2) is None


def test_ranks_whose_large_tensors_differ_are_found_now_and_then() -> None:
    a, b = own(ema=Thing(x=torch.zeros(999))), own(ema=Thing(x=torch.zeros(999)))
    a.capture()
    b._objects["ema"].state["x"][500] = 1e-30
    b.capture()
    assert a.sums(3) == b.sums(3)  # not each step: it costs reading them
    for step in (1, 2, 64, 128, 192):
        assert a.sums(step) != b.sums(step)


@pytest.mark.parametrize("in_place", [True, False])
def test_what_was_changed_after_the_capture_stays_with_that_step_alone(in_place: bool) -> None:
    """The script changes it between its batch and the step, and will not do so again."""
    thing = Thing(rate=0.1, ema=torch.zeros(999))
    state = own(thing=thing)
    state.capture()
    thing.state["rate"] = 0.2
    if in_place:
        thing.state["ema"] += 1
    else:
        thing.state["ema"] = torch.ones(999)
    state.look_ahead(7)
    for _ in range(2):  # two attempts in vain
        thing.state = {"rate": 0.3, "ema": torch.full((999,), 2.0)}
        state.put_back(7)
        assert thing.state["rate"] == 0.2 and thing.state["ema"].eq(1).all()
    state.put_back(6)  # an older step's state: its script runs again from there
    assert thing.state["rate"] == 0.1 and thing.state["ema"].eq(0).all()


def test_a_schedulers_rate_is_put_back_with_the_groups() -> None:
    """``load_state_dict`` of torch's schedulers leaves the groups' rates as they are."""
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    state = own(optimizer=Hyper(optimizer), scheduler=scheduler)
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    rate = optimizer.param_groups[0]["lr"]
    state.capture()
    optimizer.step()
    scheduler.step()
    state.put_back()
    assert optimizer.param_groups[0]["lr"] == rate != 0.1
    assert scheduler.last_epoch == 3


def test_a_routed_module_runs_its_hooks_once_and_copies_as_itself() -> None:
    model = nn.Linear(2, 2)
    calls = []
    model.register_forward_hook(lambda *_: calls.append("hook"))
    wrapped = Whole(model)
    through = []

    def runner(*args: Any, **kwargs: Any) -> Any:
        through.append(args)
        return wrapped(*args, **kwargs)

    model.forward = Routed(model, lambda: runner)  # type: ignore[assignment, arg-type]
    x = torch.ones(1, 2)
    before = model(x)
    assert (len(calls), len(through)) == (1, 1)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert twin(x).abs().sum() == 0 and len(through) == 1, "the copy has its own weights"
    assert torch.equal(model(x), before)
    with torch.no_grad():
        model(x)
    assert len(through) == 2, "where nothing is trained it is the module's own"


def test_small_tensors_come_back_to_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever keeps them there, a metric say, adds to them as they are. Without one they stay."""
    moved: list[torch.device] = []

    class There(torch.Tensor):
        """As one of a GPU says of itself."""

        device = torch.device("cuda", 0)  # type: ignore[assignment]

        def detach(self) -> Any:
            return torch.ones(2)

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    packed = own_state._pack("thing", {"there": There(), "here": torch.ones(2)}, {}, {})
    real = torch.Tensor.to
    for sees_gpu in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda seen=sees_gpu: seen)
        with monkeypatch.context() as spied:
            spied.setattr(
                torch.Tensor,
                "to",
                lambda x, *a, **k: moved.append(a[0]) or x if a[0] != torch.uint8 else real(x, *a),
            )
            found = own_state._unpack(packed, {})
        assert found["there"].tolist() == found["here"].tolist() == [1, 1]
        assert moved == [torch.device("cuda", 0)] * sees_gpu


def test_what_an_aborted_broadcast_brings_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL returns from it, with anything: captured is what it was."""

    def broken() -> None:
        raise GroupBroken("a worker was lost")

    thing = Thing(count=5, weights=torch.full((600,), 2.0))
    state = own(thing=thing)
    state.capture()
    before = {name: tensor.clone() for name, tensor in state.tensors.items()}
    monkeypatch.setattr("torch.distributed.broadcast", lambda tensor, src: tensor.zero_())
    with pytest.raises(GroupBroken):
        state.take_from(1, 3, broken)
    assert all(torch.equal(tensor, before[name]) for name, tensor in state.tensors.items())
    assert thing.state["count"] == 5


@pytest.mark.parametrize(
    ("later", "said"),
    [
        (torch.ones(1), r"was float32 \[300\] with the first batch, and is float32 \[1\] now"),
        (torch.ones(301), r"and is float32 \[301\] now"),
        (torch.ones(300, dtype=torch.float64), r"and is float64 \[300\] now"),
        (torch.tensor(5.0), r"and is float32 \[\] now"),
    ],
)
def test_a_tensor_that_becomes_another_is_refused(later: torch.Tensor, said: str) -> None:
    """One of its numbers filled all of the room, in another's precision; or torch said something of
    sizes. A list may grow."""
    thing = Thing(losses=torch.ones(300))
    state = own(thing=thing)
    state.capture()
    thing.state = {"losses": later}
    with pytest.raises(ConfigError, match=rf"thing.losses .*{said}: .* list of numbers"):
        state.capture()


def test_what_has_not_changed_is_not_written_again() -> None:
    """An optimizer's groups are read with each step, and seldom change."""
    thing = Thing(rate=0.1, betas=(0.9, 0.99))
    state = own(thing=thing)
    state.capture()
    written = state.tensors["user"]._version
    state.look_ahead(step=3)
    state.capture()
    assert state.tensors["user"]._version == written
    thing.state["rate"] = 0.2
    state.look_ahead(step=4)  # changed after step 4, and back before the capture
    thing.state["rate"] = 0.1
    state.capture()
    state.put_back(step=4)
    assert thing.state == {"rate": 0.1, "betas": (0.9, 0.99)}
