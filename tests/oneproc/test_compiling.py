"""Layers compiled one by one: the same numbers, one graph, before the first step."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ft import torch_private
from elastic_ft.core.layouts.layout import Layout
from elastic_ft.engines import compiling
from elastic_ft.engines.base import MicroBatch
from elastic_ft.engines.compiling import GRAPHS_MAX, Compiler, LayerForm, check_compiler
from elastic_ft.engines.laid_out import to_compile
from elastic_ft.errors import ConfigError, UsageError
from elastic_ft.models.decoder import Decoder, DecoderConfig
from elastic_ft.models.experts import MixtureConfig, MixtureDecoder
from tests.oneproc.alone import attached, job_of, reach, run_step

SIZES = DecoderConfig(
    vocab_size=97, n_layers=3, dim=16, n_heads=2, n_kv_heads=1, ffn_dim=24, max_sequence_length=12
)


def batch(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"tokens": torch.randint(0, 97, (4, 13), generator=generator)}


MIXED = MixtureConfig(**vars(SIZES), n_experts=5, expert_ffn_dim=8)


def losses(
    parallel: dict[str, Any], dtype: str, experts: bool = False
) -> tuple[list[Any], list[Any]]:
    def make() -> torch.nn.Module:
        return MixtureDecoder(MIXED) if experts else Decoder(SIZES)

    job = job_of(parallel=parallel, precision={"dtype": dtype}, optimizer={"lr": 1e-3})
    with attached(job, make, tokens=12) as engine:
        found, compiled = [], []
        for step in range(1, 4):
            batches = [MicroBatch(number, batch(seed)) for number, seed in enumerate((step, 9))]
            sums = engine.run_batch(step, batches, reach)
            engine.named.means(sums.named)  # what experts were sent, among them
            found.append(sums.loss)
            compiled.append(engine.apply(step, sums.tokens, sums.squares, reach).compiled)
    return found, compiled


@pytest.mark.parametrize(
    ("strategy", "dtype", "recompute", "experts"),
    [
        ("ddp", "fp32", "selective", False),
        # In CI test_generations_compile_nothing and the job of float8 have FSDP2's casts.
        pytest.param("fsdp", "bf16", False, False, marks=pytest.mark.soak),
        ("fsdp", "bf16", True, True),
    ],
)
def test_steps_are_those_of_eager_layers(
    strategy: str, dtype: str, recompute: bool | str, experts: bool
) -> None:
    """One graph for all layers, and none is left to compile in a step."""
    sections = {"strategy": strategy, "activation_checkpointing": recompute}
    found, compiled = losses(sections | {"compile": True}, dtype, experts)
    expected, nothing = losses(sections, dtype, experts)
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


def test_every_thread_compiles_as_the_process_was_set_up() -> None:
    """Steps are made in a thread of their own; on a GPU torch's threads compile the backward."""
    import torch._dynamo.config
    import torch._inductor.config

    found: list[tuple[object, object]] = []

    def look() -> None:
        limit = torch._dynamo.config.recompile_limit
        found.append((limit, torch._inductor.config.compile_threads))

    before = torch._dynamo.config.recompile_limit
    try:
        torch_private.set_up_compiler(GRAPHS_MAX + 1)
        look()
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    finally:
        torch_private.set_up_compiler(int(before))
    assert found == [(GRAPHS_MAX + 1, 1)] * 2


def forms_of(strategy: str, dtype: str, workers: int, **parallel: Any) -> list[LayerForm]:
    elastic = {"max_workers": workers, "multiple_of": parallel.pop("multiple_of", None)}
    given = {"strategy": strategy, "compile": True} | parallel
    batch = {"global_batch_size": 8, "micro_batch_size": 1}
    job = job_of(parallel=given, precision={"dtype": dtype}, elastic=elastic, batch=batch)
    return to_compile(job, torch.device("cpu"))


WHOLE, SHARDED = LayerForm(Layout(), True, False), LayerForm(Layout(), False, True)


def test_each_graph_that_worlds_may_need_is_known_beforehand() -> None:
    """A world of one has all, but not where FSDP2 casts."""
    assert forms_of("ddp", "bf16", 4) == [WHOLE]
    assert forms_of("fsdp", "bf16", 4) == forms_of("hsdp", "bf16", 4) == [SHARDED]
    assert forms_of("fsdp", "fp32", 4) == [SHARDED, WHOLE]
    two, four = Layout(dp_replicate=2, tp=2), Layout(dp_shard=2, tp=2)
    shared, alone = LayerForm(two, False, True), Layout(tp=2)
    assert forms_of("ddp", "fp32", 5, tp=2) == [shared, LayerForm(alone, False, False)]
    assert forms_of("ddp", "bf16", 4, tp=2) == [shared, LayerForm(alone, False, True)]
    assert forms_of("fsdp", "fp32", 4, tp=2, multiple_of=2) == [
        LayerForm(four, False, True),
        LayerForm(alone, False, False),
    ]
    assert forms_of("fsdp", "fp32", 3, tp=2, multiple_of=1) == [
        SHARDED,
        LayerForm(alone, False, False),
        WHOLE,
    ]


@pytest.mark.parametrize("tp", [2, 1])
def test_graphs_of_worlds_that_are_gone_make_room(monkeypatch: pytest.MonkeyPatch, tp: int) -> None:
    """With tp each world has one. torch ends the step of a layer that has too many. Without, no
    world has any, and what there is stays."""
    monkeypatch.setattr(compiling, "GRAPHS_MAX", 4)
    job = job_of(parallel={"compile": True, "tp": tp})
    compiler = Compiler(job, torch.device("cpu"))

    def layer(x: torch.Tensor, world: int) -> torch.Tensor:
        return x * world

    made = torch.compile(layer, fullgraph=True, dynamic=False, backend="eager")
    torch.compiler.reset()  # of another case
    before = torch_private.compiled_graphs()
    try:
        for world in range(2, 14) if tp > 1 else [2, 3, 4, 2, 3, 4]:
            compiler.begin_layout()
            assert made(torch.ones(2), world).tolist() == [world, world]
    finally:
        torch_private.set_up_compiler(GRAPHS_MAX)
    if tp == 1:
        assert torch_private.compiled_graphs() - before == 3


def test_batches_of_too_many_shapes_end_the_job_with_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch says that a limit of its own is hit, of which a user's job file knows nothing."""
    monkeypatch.setattr(compiling, "GRAPHS_MAX", 2)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch.compiler.reset()
    expected = r"parallel\.compile: batches have had more than 2 shapes"
    try:
        with attached(job_of(parallel={"compile": True}), lambda: Decoder(SIZES), 12) as engine:
            run_step(engine, 1, [{"tokens": batch(1)["tokens"][:, :7]}])
            with pytest.raises(UsageError, match=expected):
                run_step(engine, 2, [{"tokens": batch(2)["tokens"][:, :9]}])
    finally:
        torch.compiler.reset()
        torch_private.set_up_compiler(GRAPHS_MAX)
