"""Layers compiled one by one: the same numbers, one graph, before the first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ft.engines.compiling import check_compiler
from elastic_ft.errors import ConfigError
from elastic_ft.models.decoder import Decoder, DecoderConfig
from tests.oneproc.alone import attached, job_of, run_step

SIZES = DecoderConfig(
    vocab_size=97, n_layers=3, dim=16, n_heads=2, n_kv_heads=1, ffn_dim=24, max_sequence_length=12
)


def batch(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"tokens": torch.randint(0, 97, (4, 13), generator=generator)}


def losses(parallel: dict[str, Any], dtype: str) -> tuple[list[Any], list[Any]]:
    job = job_of(parallel=parallel, precision={"dtype": dtype}, optimizer={"lr": 1e-3})
    with attached(job, lambda: Decoder(SIZES), tokens=12) as engine:
        steps = [run_step(engine, step, [batch(step), batch(9)]) for step in range(1, 4)]
    return [s[0] for s in steps], [s[2].compiled for s in steps]


@pytest.mark.parametrize(
    ("strategy", "dtype", "recompute"), [("ddp", "fp32", "selective"), ("fsdp", "bf16", False)]
)
def test_steps_are_those_of_eager_layers(strategy: str, dtype: str, recompute: bool | str) -> None:
    """One graph for all layers, and none is left to compile in a step."""
    sections = {"strategy": strategy, "activation_checkpointing": recompute}
    found, compiled = losses(sections | {"compile": True}, dtype)
    expected, nothing = losses(sections, dtype)
    assert found == pytest.approx(expected, rel=1e-5 if dtype == "fp32" else 0.01)
    assert nothing == [None] * 3
    first, *others = compiled
    assert first.graphs == 0 and first.warmed <= 1 and first.warmed_s > 0
    assert others == [None, None]


def test_without_a_compiler_there_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    check_compiler(on_gpu=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"parallel\.compile: needs a C\+\+ compiler"):
        check_compiler(on_gpu=False)
