"""Between any two layouts, in place and exactly: after a kill at a named point, and growing back.

A chain of moves is one job; each move is a test that reads it. Golden losses are one process's;
``python -m tests.multiproc.test_moves`` makes them.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

from elastic_ft.core.layouts.layout import Layout
from tests.core.test_expert_owners import fewest_moved
from tests.multiproc.layouts import MIXTURE, MODEL, train_from_the_start
from tests.multiproc.moves import (
    STEPS,
    Chain,
    Move,
    assemble,
    bytes_allowed,
    job_of_moves,
    moves_through,
    run_moves,
)
from tests.multiproc.pool import Pool

GOLDEN = Path(__file__).parent / "golden" / "moves.json"
TOLERANCE = 1e-5  # relative, of losses
EXPERTS, ROWS = MIXTURE["kwargs"]["n_experts"], MIXTURE["kwargs"]["dim"]
pytestmark = pytest.mark.timeout(600)  # a chain's first test includes the run


MISTRAL: dict[str, Any] = {
    "model_type": "mistral",
    "sliding_window": 5,
    "hidden_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 36,
    "vocab_size": 102,
    "tie_word_embeddings": True,
}


def deepspeed(stage: int) -> dict[str, Any]:
    return {"engine": "deepspeed", "zero_stage": stage}


# name -> (moves, what else the run takes)
CHAINS: dict[str, tuple[list[Move], dict[str, Any]]] = {
    # Shards of the dead are at their nodes' keepers.
    "keepers": (
        moves_through(
            *("ddp4", "fsdp3"),
            *("fsdp4", "ddp3"),
            *("hsdp2x2", "pp3-ddp1"),
            *("fsdp4", "fsdp3"),
            *("pp2-fsdp2", "ddp1-tp3"),
            *("pp4-ddp1", "ddp3"),
            *("ddp2-tp2", "fsdp3"),
            *("pp2-ddp2", "ddp3"),
            "ddp4",
            faults=[
                ("backward", 0),
                ("inside_optimizer", 1),
                ("forward", 3),
                ("reduce", 2),
                ("backward", 1),
                ("forward", 3),
                ("inside_optimizer", 2),
                ("before_optimizer", 0),
            ],
        ),
        {},
    ),
    # Nodes have no keeper: what the dead had comes from their buddies.
    "buddies": (
        moves_through(
            *("pp4-ddp1", "pp3-ddp1"),
            *("pp2-ddp2", "fsdp3"),
            *("fsdp2-tp2", "pp3-ddp1"),
            *("pp2-ddp1-tp2", "ddp3"),
            *("ddp2-tp2", "ddp1-tp3"),
            *("hsdp2x2", "fsdp3"),
            *("pp4-ddp1", "fsdp3"),
            *("pp2-fsdp2", "pp3-ddp1"),
            "fsdp4",
            faults=[
                ("backward", 1),
                ("inside_optimizer", 3),
                ("forward", 0),
                ("backward", 2),
                ("inside_optimizer", 1),
                ("after_optimizer", 2),
                ("inside_optimizer", 0),
                ("forward", 2),
            ],
        ),
        {"keepers": False},
    ),
    # Ranks share positions, in attention heads; losses in chunks, recomputing selectively.
    "long": (
        moves_through(
            *("ddp1-cp4", "ddp1-cp3"),
            *("fsdp2-cp2", "fsdp3"),
            *("ddp1-cp2-tp2", "ddp1-cp3"),
            "ddp2-cp2",
            faults=[("backward", 2), ("inside_optimizer", 1), ("forward", 3)],
        ),
        {
            "parallel": {
                "cp_method": "ulysses",
                "loss_chunk_tokens": 7,
                "activation_checkpointing": "selective",
            }
        },
    ),
    # Ranks share experts out: by two of four, by three (3, 2, 2), by all, within replicas; by none,
    # and in stages.
    "experts": (
        moves_through(
            *("fsdp4-ep2", "fsdp3-ep3"),
            *("fsdp4-ep4", "fsdp3-ep3"),
            *("hsdp2x2-ep2", "fsdp3"),
            "pp2-ddp2",
            faults=[("backward", 1), ("inside_optimizer", 3), ("forward", 2)],
        ),
        {"model": MIXTURE},
    ),
    # A transformers model, tied, with a sliding window: in stages, and ranks share its positions.
    "mistral": (
        moves_through(
            *("pp2-fsdp2", "pp3-ddp1"),
            *("pp2-ddp1-tp2", "ddp1-cp3"),
            "pp2-ddp1-cp2",
            faults=[("backward", 3), ("inside_optimizer", 1)],
        ),
        {"model": {"transformers": MISTRAL}},
    ),
    # Half the world goes at once, keeper included: stages, replicas and tensor-parallel groups.
    "nodes": (
        moves_through(
            *("pp2-ddp2", "ddp2"),
            *("ddp2-tp2", "pp2-ddp1"),
            *("hsdp2x2", "fsdp2"),
            *("pp2-fsdp2", "ddp1-tp2"),
            "fsdp4",
            faults=[("node", 0), ("node", 3), ("node", 1), ("node", 2)],
        ),
        {
            "nodes": {"n0": 2, "n1": 2},
            "elastic": {"workers_per_node": 2, "heartbeat_timeout_s": 12},
            "parallel": {"schedule": "zero_bubble"},
        },
    ),
    **{
        f"zero{stage}": (
            moves_through(*(f"{kind}3", f"{kind}2") * 2, f"{kind}3", faults=points),
            {"workers": 3, "parallel": deepspeed(stage)},
        )
        for stage, kind, points in (
            (0, "ddp", [("backward", 1), ("inside_optimizer", 2)]),
            (1, "fsdp", [("backward", 0), ("inside_optimizer", 1)]),
            (2, "fsdp", [("forward", 2), ("inside_optimizer", 0)]),
            (3, "fsdp", [("backward", 1), ("inside_optimizer", 2)]),
        )
    },
}
MOVES = [(name, number) for name, (moves, _) in CHAINS.items() for number in range(len(moves))]


@pytest.fixture(scope="module")
def chain_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Chain]:
    @functools.cache
    def run(name: str) -> Chain | Exception:
        moves, options = CHAINS[name]
        try:
            return run_moves(moves, tmp_path_factory.mktemp(name), **options)
        except Exception as error:  # kept: the next move need not wait for it again
            return error

    def get(name: str) -> Chain:
        found = run(name)
        if isinstance(found, Exception):
            raise found
        return found

    return get


@functools.cache
def golden(model: str) -> list[float]:
    found: dict[str, list[float]] = json.loads(GOLDEN.read_text())
    return found[model]


def title(pair: tuple[str, int]) -> str:
    name, number = pair
    return f"{name} {number} {CHAINS[name][0][number]}"


@pytest.mark.parametrize("pair", MOVES, ids=title)
def test_moves_in_place_and_exactly(
    chain_of: Callable[[str], Chain], pair: tuple[str, int]
) -> None:
    name, number = pair
    chain, move = chain_of(name), CHAINS[name][0][number]
    before, after = chain.formed()[number : number + 2]
    recovery = chain.run.recoveries[number]
    story = chain.run.story()
    assert (before["layout"], after["layout"]) == (move.before, move.after), story
    assert_it_was_lost(chain, CHAINS[name][0], number)
    assert (recovery["layout_before"], recovery["layout_after"]) == (move.before, move.after)
    assert recovery["steps_lost"] == 0 and recovery["survivors_kept_pid"], story
    old, new = (assemble(state) for state in chain.states(number))
    assert old.keys() == new.keys(), story
    differing = [tensor for tensor in old if old[tensor].tobytes() != new[tensor].tobytes()]
    assert not differing, story
    most = bytes_allowed(chain, number)
    assert most is None or recovery["bytes_moved"] <= most, story
    assert_losses(chain, {before["generation"], after["generation"]}, model_of(name))


def assert_it_was_lost(chain: Chain, moves: list[Move], number: int) -> None:
    move = moves[number]
    before, after = (
        {member["worker"]: member for member in line["members"]}
        for line in chain.formed()[number : number + 2]
    )
    lost = {before[who]["rank"] for who in before.keys() - after.keys()}
    stayed = {(who, before[who]["pid"]) for who in before.keys() & after.keys()}
    assert stayed <= {(who, member["pid"]) for who, member in after.items()}
    if not move.point:
        assert not lost and len(after) > len(before)
    elif move.point == "node":
        assert move.rank in lost and len(lost) == 2, chain.run.story()
    else:
        assert lost == {move.rank}, chain.run.story()
        kills = sum(earlier.point not in ("", "node") for earlier in moves[:number])
        fired = [e["worker"] for e in chain.run.all("fault_fired") if e["index"] == kills]
        assert fired == [who for who in before if before[who]["rank"] in lost], chain.run.story()


def model_of(name: str) -> str:
    return name if "model" in CHAINS[name][1] else "decoder"


def assert_losses(chain: Chain, generations: set[int], model: str) -> None:
    lines = [line for line in chain.run.steps if line["generation"] in generations]
    assert lines
    for line in lines:
        expected = golden(model)[line["step"] - 1]
        assert line["loss"] == pytest.approx(expected, rel=TOLERANCE, abs=0), line


@pytest.mark.parametrize("number", range(4))
def test_as_few_experts_move_as_can_be(chain_of: Callable[[str], Chain], number: int) -> None:
    """Of all ways to deal them evenly. What a rank has as a copy may be too old to count."""
    chain = chain_of("experts")
    layout = Layout.parse(CHAINS["experts"][0][number].after)
    (before, after), kept = chain.states(number), chain.kept(chain.source_of(number))
    members = sorted(chain.formed()[number + 1]["members"], key=itemgetter("rank"))
    workers = [member["worker"] for member in members]
    has = {who: rows_of_experts(listed) for who, listed in before.items()}
    needed = [rows_of_experts(after[who]) for who in workers]
    own = [has.get(who, set()) for who in workers]
    copies = [set().union(*(has.get(of, ()) for of in kept.get(who, ()))) for who in workers]
    lacking = sum(
        len(need - (had | more)) for need, had, more in zip(needed, own, copies, strict=True)
    )
    counts = [len({expert for expert, _ in need}) for need in needed]
    assert max(counts) - min(counts) <= 1
    if " lacks " not in chain.formed()[number + 1]["reason"]:  # else what was live was too new
        assert lacking <= fewest_moved(EXPERTS, layout, own, ROWS), chain.run.story()


def rows_of_experts(listed: Sequence[Any]) -> set[tuple[int, int]]:
    """Of one tensor, (expert, row)."""
    boxes = [box for name, _, box, _ in listed if name == "model.layers.0.ffn.experts.gate"]
    return {
        (expert, row)
        for box in boxes
        for expert in range(box.offsets[0], box.stops[0])
        for row in range(box.offsets[1], box.stops[1])
    }


def test_a_stage_without_a_replica_comes_from_its_buddy(chain_of: Callable[[str], Chain]) -> None:
    """And tensor-parallel ranks, and shards: wherever the dead alone had something."""
    chain = chain_of("buddies")
    assert chain.formed()[1]["source"] == "peer", chain.run.story()
    sources = [line["source"] for line in chain.formed()[1::2]]
    assert sources.count("peer") > 1 and "keeper" not in sources, chain.run.story()


def make_golden() -> None:
    given = {model_of(name): options.get("model", MODEL) for name, (_, options) in CHAINS.items()}
    found = {}
    with Pool(1) as pool:
        for name, model in given.items():
            ((_, steps),) = pool(train_from_the_start, job_of_moves(model=model), STEPS, world=1)
            found[name] = [step["loss"] for step in steps]
    GOLDEN.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    make_golden()
