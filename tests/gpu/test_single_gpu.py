"""What needs a GPU: NCCL groups, snapshots to pinned memory on a side stream, bf16 training."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from elastic_ft.config import parse_job
from elastic_ft.core.assignment import Assignment, Member, Source, Tier
from elastic_ft.core.layouts.layout import LayoutWish, plan_layout
from elastic_ft.core.shares import shares
from elastic_ft.groups.groups import Groups
from elastic_ft.hosts.local import run_local

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


def job(strategy: str, **sections: object) -> object:
    return parse_job(
        {
            "name": "gpu",
            "steps": 12,
            "model": {"preset": "decoder-4m"},
            "data": {
                "url": "stdlib:",
                "vocab_size": 1024,
                "sequence_length": 128,
                "max_tokens": 200_000,
            },
            "batch": {"global_batch_size": 8, "micro_batch_size": 4},
            "parallel": {"strategy": strategy},
            "precision": {"dtype": "bf16"},
            "elastic": {"min_workers": 1, "max_workers": 1},
            "checkpoint": {"every_steps": 5},
            **sections,
        }
    )


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_trains_and_checkpoints_on_one_gpu(strategy: str, tmp_path) -> None:
    result = run_local(job(strategy), str(tmp_path))
    assert result["status"] == "completed", result["reason"]
    assert [ref["step"] for ref in result["checkpoints"]] == [12, 10]


def test_nccl_group_forms_again_after_an_abort() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    member = Member("w0", "n0", "localhost", 0)
    for generation in (1, 2, 3):
        layout, _ = plan_layout(LayoutWish(strategy="fsdp"), 1)
        source = Source(0, Tier.INITIAL)
        assignment = Assignment(generation, (member,), (), layout, source, ((),), "test")
        groups = Groups(dict(shares(assignment))["w0"], member, ("127.0.0.1", store.port))
        groups.form(torch.device("cuda", 0), 30)
        ones = torch.ones(4, device="cuda")
        dist.all_reduce(ones)
        torch.cuda.synchronize()
        assert ones.tolist() == [1.0] * 4
        groups.abort("test")
        groups.teardown()
