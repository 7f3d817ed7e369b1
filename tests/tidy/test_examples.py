"""Every example job is valid, and the ones that need no network open and build."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_ft.cli.demo import JOB_FILE
from elastic_ft.config import load_job

ROOT = Path(__file__).parents[2]
EXAMPLES = [JOB_FILE, *sorted((ROOT / "examples").glob("*.yaml"))]


def test_there_are_examples() -> None:
    assert {"custom", "pretrain_s3", "transformers"} <= {path.stem for path in EXAMPLES}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_a_valid_job(path: Path) -> None:
    assert load_job(path).steps > 0


def test_the_custom_example_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from elastic_ft.data.dataset import open_dataset
    from elastic_ft.models import block_modules, build_model, loss_sum

    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))
    job = load_job("examples/custom.yaml")
    bundle = open_dataset(job.data, job.seed)
    torch.manual_seed(0)
    model = build_model(job.model, vocab_size=None, sequence_length=None)
    assert len(block_modules(model)) == 4
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.optimizer.lr)
    losses = []
    for step in range(30):
        samples = [bundle.train[step * 64 + index] for index in range(64)]
        loss, count = loss_sum(model, bundle.train.collate(samples))
        losses.append(loss.item() / count)
        optimizer.zero_grad()
        (loss / count).backward()
        optimizer.step()
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])


def test_the_transformers_example_builds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from elastic_ft.cli.check_model import check_model_and_data

    job = load_job(ROOT / "examples" / "transformers.yaml")
    changes = {"cache_dir": str(tmp_path), "max_tokens": 20_000}
    job = job.model_copy(update={"data": job.data.model_copy(update=changes)})
    found = check_model_and_data(job)
    assert found.tensors["model.lm_head.weight"] == ("float32", (2048, 128))
