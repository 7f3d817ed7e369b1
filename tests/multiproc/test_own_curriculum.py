"""What a script sets on its dataset between two steps is there for the next step's samples."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from elastic_ft.config import Job
from elastic_ft.core.batches import DataOrder
from elastic_ft.engines.modules import seed_all_for
from elastic_ft.faults import PointFault
from tests.multiproc.harness import ROOT
from tests.multiproc.test_own_loop import CLOSE, make_job, run

STEPS = 12


def curriculum(out: Path, workers: int, readers: int) -> Job:
    script = str(ROOT / "tests/multiproc/own_curriculum.py")
    loop = {"script": script, "arguments": [str(out / "told"), str(readers)]}
    return make_job(out, workers=workers, loop=loop)


def expected() -> list[float]:
    """The same loop, without this project."""
    seed_all_for(3, 0, 0)
    model, rows = torch.nn.Linear(8, 1), torch.randn(64, 8)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.01), []
    for step in range(1, STEPS + 1):
        ids = DataOrder(3, 64).sample_ids((step - 1) * 16, step * 16)
        x = torch.stack([rows[i % 64] for i in ids]) * (1 + (step - 1) // 4)
        x[:, 3 + step % 5 :] = 0
        loss = F.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


@pytest.mark.parametrize("readers", [0, 2])
@pytest.mark.parametrize("workers", [1, 3])
def test_samples_are_read_as_the_script_has_set_them(
    tmp_path: Path, workers: int, readers: int
) -> None:
    """They are read ahead, by processes that were forked before, and by who has just joined."""
    faults = (PointFault("backward", rank=1, step=6),) if workers > 1 else ()
    found = run(tmp_path, curriculum(tmp_path, workers, readers), faults)
    assert found.result["status"] == "completed", found.story()
    assert not found.all("worker_refused"), found.story()
    assert [line["loss"] for line in found.steps] == pytest.approx(expected(), rel=10 * CLOSE)
    assert found.worlds()[-1] == workers, found.story()
