"""What the planner says of memory is what tensors take, to a few percent: of one rank alone, whose
collectives do nothing (and copy nothing, as Gloo's would). ``benchmarks/memory.py`` has real ones.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.memory import BF16, Case, choice_of, make_job, parallel, peak_of_tensors
from elastic_ft import torch_private
from elastic_ft.config import Job
from elastic_ft.core.assignment import Assignment, Member, Source, Tier
from elastic_ft.core.layouts.layout import Layout
from elastic_ft.core.layouts.memory_costs import stage_memory
from elastic_ft.core.shares import shares
from elastic_ft.engines.base import MicroBatch
from elastic_ft.engines.native import NativeEngine
from elastic_ft.groups import groups as groups_module
from elastic_ft.groups.groups import Groups
from elastic_ft.models.build import build_model
from elastic_ft.models.describe import describe_job

CPU = torch.device("cpu")
SIZES = {"n_layers": 4, "dim": 128, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 384}
CASES = [  # and a rank
    (Case(Layout(dp_shard=4), BF16), 1),
    (Case(Layout(dp_shard=2), parallel(activation_checkpointing=True)), 0),
    (Case(Layout(dp_shard=3), parallel(activation_checkpointing="selective"), 2), 0),
    (Case(Layout(dp_shard=2), parallel(loss_chunk_tokens=64) | BF16), 0),
    (Case(Layout(dp_replicate=2, tp=2), {}, 1, 3), 0),
    (Case(Layout(cp=2)), 1),
    (Case(Layout(cp=2, tp=2), parallel(cp_method="ulysses"), 8), 1),
    (Case(Layout(cp=4), parallel(activation_checkpointing=True), 8), 0),  # which sees the most
    (Case(Layout(cp=4), parallel(activation_checkpointing="selective"), 8), 0),
    (Case(Layout(cp=8), {}, 16), 0),
    (Case(Layout(dp_replicate=2), {"comm": {"compress_replicas": "powersgd"}}), 1),
    (Case(Layout(dp_replicate=2, dp_shard=2), {"comm": {"compress_replicas": "powersgd"}}), 0),
    (Case(Layout(pp=2), {}, 1, 4), 0),
    (Case(Layout(pp=2, dp_shard=2), parallel(schedule="gpipe")), 2),
]


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    pipelining: Any = pytest.importorskip("torch.distributed.pipelining.stage")
    agreed = torch.ones(1, dtype=torch.int32)  # that all stages know their shapes
    for vote in ("_warmup_forward_vote", "_warmup_backward_result"):
        monkeypatch.setattr(pipelining.PipelineStage, vote, lambda *_, **__: agreed)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    torch_private.forget_meshes()


def groups_of(layout: Layout, rank: int) -> Groups:
    world = layout.world_size
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    members = tuple(Member(f"w{r}", f"n{r}", "localhost", 0) for r in range(world))
    source = Source(0, Tier.INITIAL)
    assignment = Assignment(1, members, (), layout, source, ((),) * world, "test")
    groups = Groups(dict(shares(assignment))[f"w{rank}"], members[rank], ("127.0.0.1", 1))
    groups.mesh = groups_module.make_mesh(layout, CPU)
    groups.context = groups_module._make_context(layout)
    return groups


def tiny(case: Case) -> Job:
    job = make_job(replace(case, preset="decoder-1m", sections=_sized(case.sections)))
    data = job.data.model_copy(update={"vocab_size": 2048, "sequence_length": 128})
    return job.model_copy(update={"data": data})


def _sized(sections: dict[str, Any]) -> dict[str, Any]:
    return sections | {"model": {"kwargs": SIZES}}


def peak_of(case: Case, rank: int) -> int:
    job, length, groups = tiny(case), 128, groups_of(case.layout, rank)

    def factory() -> torch.nn.Module:
        return build_model(job.model, vocab_size=2048, sequence_length=length)

    engine = NativeEngine(job, factory, CPU, length)
    engine.prepare()
    shape = job.batch.micro_batch_size, length + 1
    batches = [
        MicroBatch(n, {"tokens": torch.zeros(shape, dtype=torch.int64)})
        for n in range(case.micro_batches)
    ]

    def train() -> None:
        engine.attach(groups)
        with torch.no_grad():
            for tensor in engine.state().values():
                tensor.local.fill_(0.01)
        for step in (1, 2):
            engine.run_batch(step, batches, lambda *point: None)
            engine.apply(step, job.batch.global_batch_size * length, 1.0, lambda *point: None)

    gc.collect()
    return peak_of_tensors(train)


@pytest.mark.parametrize(("case", "rank"), CASES, ids=lambda of: str(getattr(of, "layout", of)))
def test_predicted_is_what_tensors_take(case: Case, rank: int) -> None:
    job = tiny(case)
    stage = case.layout.coordinates(rank).pp
    choice = choice_of(job, case.layout)
    predicted = stage_memory(describe_job(job), choice, stage, fused=False, copies=False).total
    assert predicted == pytest.approx(peak_of(case, rank), rel=0.02)
