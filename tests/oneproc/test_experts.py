"""A mixture of experts: each token by the experts that its router chose, none left out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from elastic_ft.config import Job, parse_job
from elastic_ft.controller.planning import planning_of
from elastic_ft.core.layouts.layout import Layout
from elastic_ft.core.layouts.rank_memory import block_activation_bytes
from elastic_ft.core.layouts.work import Work
from elastic_ft.core.placement import Cut, list_parts
from elastic_ft.engines.balancing import Balancing
from elastic_ft.engines.base import MicroBatch
from elastic_ft.engines.expert_parallel import experts_of_each, runs_of_experts, shard_experts
from elastic_ft.engines.laid_out import check_parallel
from elastic_ft.engines.native import state_tensor
from elastic_ft.engines.pipeline import cut, joined, tokens_and_targets
from elastic_ft.engines.shared_positions import share_positions
from elastic_ft.errors import ConfigError, ModelError
from elastic_ft.models import build_model
from elastic_ft.models.build import initial_state
from elastic_ft.models.context_parallel import ContextShare
from elastic_ft.models.decoder import Decoder, DecoderConfig, rotations
from elastic_ft.models.describe import describe_decoder
from elastic_ft.models.expert_exchange import ExpertShare
from elastic_ft.models.experts import MIXTURES, MixtureConfig, MixtureDecoder, MixtureOfExperts
from elastic_ft.models.loss import loss_sum, shifted
from elastic_ft.models.mixture_stage import MixtureStage
from elastic_ft.models.named import fetched
from elastic_ft.torch_private import pretended_world

TINY = MixtureConfig(
    vocab_size=61,
    n_layers=2,
    dim=16,
    n_heads=2,
    n_kv_heads=1,
    ffn_dim=24,
    max_sequence_length=12,
    n_experts=5,
    experts_per_token=2,
    expert_ffn_dim=8,
    router_loss=0.01,
)


def filled(config: MixtureConfig = TINY, seed: int = 3) -> MixtureDecoder:
    model = MixtureDecoder(config)
    for name, value in initial_state(lambda: MixtureDecoder(config), seed):
        model.get_parameter(name).data.copy_(value) if ".bias" not in name else None
    return model


def by_token(mixture: MixtureOfExperts, x_D: Tensor) -> Tensor:
    scores = mixture.router(x_D).sigmoid()
    chosen = (scores + mixture.bias).topk(mixture.config.experts_per_token).indices
    found, experts = mixture.shared(x_D), mixture.experts
    for expert in chosen:
        inner = F.silu(x_D @ experts.gate[expert]) * (x_D @ experts.up[expert])
        found = found + scores[expert] / scores[chosen].sum() * (inner @ experts.down[expert])
    return found


def test_each_token_is_computed_by_those_it_was_sent_to() -> None:
    torch.manual_seed(0)
    mixture = filled().layers[0].ffn
    mixture.bias += torch.tensor([0.3, -0.2, 0.0, 0.1, -5.0])  # nobody goes to the last one
    x_BTD = torch.randn(3, 7, TINY.dim)
    found_BTD, _ = mixture(x_BTD)
    expected = torch.stack([by_token(mixture, x_D) for x_D in x_BTD.flatten(0, 1)])
    torch.testing.assert_close(found_BTD.flatten(0, 1), expected)
    assert mixture.load is not None
    assert int(mixture.load.sum()) == 3 * 7 * TINY.experts_per_token
    assert int(mixture.load[-1]) == 0


def test_an_expert_without_tokens_has_a_gradient() -> None:
    """FSDP2 and DDP wait for those of all ranks."""
    mixture = filled().layers[0].ffn
    with torch.no_grad():
        mixture.bias[2] = -5.0
    mixture(torch.randn(1, 3, TINY.dim))[0].sum().backward()
    assert mixture.experts.gate.grad is not None
    assert not mixture.experts.gate.grad[2].any()


def test_what_routers_add_is_each_sequences_own() -> None:
    """However the sequences of a batch are divided into micro-batches."""
    torch.manual_seed(0)
    model = filled()
    batch = {"tokens": torch.randint(61, (4, 11))}
    with torch.no_grad():
        whole, count = loss_sum(model, batch)
        parts = [loss_sum(model, {"tokens": row[None]})[0] for row in batch["tokens"]]
        assert float(whole) == pytest.approx(float(sum(parts)), rel=1e-6)
        model.eval()
        alone, same = loss_sum(model, batch)
    assert int(count) == int(same)
    assert 0.5 < (float(whole) - float(alone)) / (int(count) * TINY.router_loss * 2) < 3


def test_padding_goes_to_no_expert() -> None:
    torch.manual_seed(0)
    model, tokens = filled(), torch.randint(61, (1, 9))
    balancing = Balancing([model])
    found = []
    for length in (10, 13):
        mask = (torch.arange(length) < 9).long()[None]
        batch = {"tokens": F.pad(tokens, (0, length - 9)), "attention_mask": mask}
        balancing.begin()
        loss, _ = loss_sum(model, batch)
        found.append((float(loss), fetched(balancing.queued())))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    assert found[0][1] == found[1][1]


@pytest.mark.parametrize("masked", [False, True])
def test_what_a_pipeline_pads_goes_to_no_expert(masked: bool) -> None:
    """It makes a step's micro-batches as long as the longest."""
    torch.manual_seed(0)
    model, batches = filled(), []
    for number, length in enumerate((11, 6)):
        data = {"tokens": torch.randint(61, (2, length))}
        if masked:
            data["attention_mask"] = (torch.arange(length) < 5 + number).long().expand(2, -1)
        batches.append(MicroBatch(number, data))
    stages = [cast("MixtureStage", cut(model, rank, 2, "1f1b")[rank]) for rank in range(2)]
    whole, staged = Balancing([model]), Balancing(stages, model)
    whole.begin()
    routed = 0.0
    for batch in batches:
        tokens, _, more = shifted(**batch.data)
        routed += float(model(tokens, **more).router_sum.detach())
    expected = fetched(whole.queued())
    staged.begin()
    x, _, more = joined([tokens_and_targets(b, torch.device("cpu"), stages[0]) for b in batches])
    for stage in stages:
        stage.length = more["counted"].shape[1]
        x = stage(x, **more)
    assert float(sum(stage.router_sum for stage in stages)) == pytest.approx(routed, rel=1e-6)
    assert fetched(staged.queued()) == expected


def test_tokens_are_counted_once() -> None:
    """Not again where a layer is computed again for its gradients, nor those of padding."""
    mixture, x_BTD = filled().layers[0].ffn, torch.randn(2, 5, TINY.dim, requires_grad=True)
    balancing = Balancing([mixture])
    balancing.begin()
    checkpoint(mixture, x_BTD, use_reentrant=False)[0].sum().backward()
    balancing.counts(0.0)
    mixture(x_BTD)
    assert sum(fetched(balancing.queued())) == 2 * 5 * TINY.experts_per_token


def test_a_bias_follows_the_load_of_the_global_batch() -> None:
    model = filled()
    balancing = Balancing([model])
    balancing.begin()
    assert fetched(balancing.queued()) == [0.0] * 10, "a rank without a micro-batch"
    balancing.agreed([4, 1, 3, 2, 0, 2, 2, 2, 2, 2])
    balancing.apply()
    first, second = (layer.ffn.bias for layer in model.layers)
    rate = TINY.bias_rate
    torch.testing.assert_close(first, rate * torch.tensor([-1.0, 1.0, -1.0, 0.0, 1.0]))
    assert not second.any()


@pytest.mark.parametrize("name", MIXTURES)
def test_the_planner_counts_all_experts_and_computes_some(name: str) -> None:
    config = MIXTURES[name]
    with torch.device("meta"):
        model = MixtureDecoder(config)
    shape = describe_decoder(config, 128)
    block = sum(p.numel() for p in model.layers[0].parameters())
    assert shape.block_parameters == block
    total = sum(p.numel() for p in model.parameters())
    ends = shape.embedding_parameters + shape.output_parameters
    assert config.n_layers * block + ends == total
    millions = float(name.rpartition("-")[2][:-1]) * {"m": 1e6, "b": 1e9}[name[-1]]
    assert abs(total / millions - 1) < 0.1
    experts = 3 * config.dim * config.expert_ffn_dim
    assert shape.idle_parameters == (config.n_experts - config.experts_per_token) * experts


def test_the_planner_knows_what_a_layer_keeps_for_backward() -> None:
    """Rows on the way to experts and back among it: the most of it here."""
    wide = {"dim": 256, "n_heads": 4, "n_kv_heads": 2, "max_sequence_length": 64}
    config = dataclasses.replace(TINY, **wide, n_experts=8, experts_per_token=6)
    block = MixtureDecoder(config).layers[0]
    weights = {p.untyped_storage().data_ptr() for p in block.parameters()}
    x_BTD, kept = torch.randn(2, 64, 256, requires_grad=True), {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage  # held: no other can have its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        found = block(x_BTD, rotations(64, config.head_dim, config.rope_theta, x_BTD.device))
    assert len(found) == 2
    measured = sum(s.nbytes() for pointer, s in kept.items() if pointer not in weights)
    work = Work(describe_decoder(config, 64), 2, compute_bytes=4)
    assert measured / 128 == pytest.approx(block_activation_bytes(work, 1, fused=False), rel=0.03)


@pytest.mark.parametrize(
    ("parallel", "said"),
    [
        ({"tp": 2}, "parallel.tp"),
        ({"cp": 2, "pp": 2}, "parallel.cp: stages of a mixture"),
        ({"compile": True, "activation_checkpointing": "selective"}, "parallel.compile"),
        ({"loss_chunk_tokens": 8}, "parallel.loss_chunk_tokens"),
        ({"engine": "deepspeed", "zero_stage": 1, "strategy": "fsdp"}, "parallel.engine"),
        ({"ep": 9}, "parallel.ep: 9 ranks can't share 8 experts of a layer"),
    ],
)
def test_what_it_can_not_be_laid_out_by_is_refused(parallel: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{said}"):
        check(job_of(parallel={"strategy": "fsdp"} | parallel))


def test_a_plan_of_ones_own_cuts_no_mixture() -> None:
    cut_by = {"strategy": "fsdp", "tp": 2, "tp_plan": f"{__name__}:PLAN"}
    with pytest.raises(ConfigError, match=r"^parallel\.tp: not of mixtures of experts"):
        check(job_of(parallel=cut_by))


PLAN = {"layers.*.attention.query": "colwise"}


def job_of(**sections: Any) -> Job:
    values: dict[str, Any] = {
        "name": "experts",
        "steps": 1,
        "model": {"preset": "decoder-moe-4m"},
        "data": {"url": "stdlib:"},
        "batch": {"global_batch_size": 8},
    }
    return parse_job(values | sections)


def check(job: Job) -> None:
    with torch.device("meta"):
        model = build_model(job.model, vocab_size=None, sequence_length=None)
    check_parallel(job, model, 16)


def test_who_has_no_experts_to_share_out_is_refused() -> None:
    shared = {"strategy": "fsdp", "ep": 2}
    check(job_of(parallel=shared))
    with pytest.raises(ConfigError, match=r"^parallel\.ep: .*, found Decoder$"):
        check(job_of(parallel=shared, model={"preset": "decoder-1m"}))
    with pytest.raises(ConfigError, match=r"^parallel\.ep: not with optimizer\.name muon"):
        check(job_of(parallel=shared, optimizer={"name": "muon"}))


def test_the_planner_may_share_experts_out_where_the_engine_can() -> None:
    auto: dict[str, Any] = {"strategy": "auto"}
    batch = {"global_batch_size": 40, "micro_batch_size": 1}
    auto |= {"devices": {"memory_gb": 1}}
    large = {"parallel": auto, "batch": batch, "elastic": {"max_workers": 10}}
    assert planning_of(job_of(**large)).limits.ep_max == 8
    for other in ({"optimizer": {"name": "muon"}}, {"model": {"preset": "decoder-1m"}}):
        assert planning_of(job_of(**large | other)).limits.ep_max == 1


def test_tokens_find_experts_wherever_these_are() -> None:
    """Rows lie rank by rank, and a rank's by its experts."""
    group: Any = None
    chosen = torch.tensor([[0, 4], [3, 1]])
    assert ExpertShare(group, (0, 0, 1, 1, 2)).slots(chosen) is chosen
    assert ExpertShare(group, (2, 0, 1, 0, 1)).slots(chosen).tolist() == [[4, 3], [1, 0]]


def test_what_a_rank_has_of_experts_is_listed_by_runs_of_them() -> None:
    """As the first of those that share seven by two, in two shards within experts, and in three of
    them, as these divide nothing."""
    for shards, runs in ((2, [(0, 1), (2, 2), (6, 1)]), (3, [(0, 1), (2, 1)])):
        layout = Layout(dp_shard=2 * shards, ep=2, owners=(0, 1, 0, 0, 1, 1, 0))
        with pretended_world(layout.world_size):
            mesh = init_device_mesh("cpu", (shards, 2), mesh_dim_names=("efsdp", "ep"))
            config = dataclasses.replace(TINY, n_experts=7)
            with torch.device("meta"):
                model = MixtureDecoder(config)
            assert experts_of_each(model) == 7
            shard_experts(model, mesh, layout, {"mp_policy": MixedPrecisionPolicy()})
            down = model.layers[0].ffn.experts.down
            model.layers[0].ffn.experts.to_empty(device="cpu")
            pieces = [*runs_of_experts(down, state_tensor(down), layout)]
        assert [(piece.box.offsets[0], piece.box.sizes[0]) for piece in pieces] == runs
        listing = list_parts(
            [("w", "float32", 4, piece.shape, piece.box) for piece in pieces],
            layout,
            layout.place_of(0),
        )
        assert [kind.cut for kind in listing.kinds] == [Cut(None, 1 if shards == 2 else 0, 0)]
        assert all(tuple(piece.local.shape) == piece.box.sizes for piece in pieces)


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="experts_per_token 6 is more than n_experts 5"):
        dataclasses.replace(TINY, experts_per_token=6)


DENSE = DecoderConfig(
    vocab_size=61, n_layers=1, dim=16, n_heads=2, n_kv_heads=1, ffn_dim=24, max_sequence_length=12
)


@pytest.mark.parametrize("make", [filled, lambda: Decoder(DENSE)], ids=["mixture", "decoder"])
def test_a_mask_of_ones_own_is_refused_where_ranks_share_positions(
    make: Callable[[], MixtureDecoder | Decoder],
) -> None:
    """Only a job's first sample is looked at before it starts: this batch is a later one."""
    tokens = torch.arange(18).reshape(2, 9) % 61
    mask = torch.ones_like(tokens)
    mask[0, 5:] = 0
    with pretended_world(2):
        model = make()
        share_positions(model, ContextShare(dist.group.WORLD))
        with pytest.raises(ModelError, match=r"^parallel\.cp: .*found attention_mask in a batch"):
            loss_sum(model, {"tokens": tokens, "attention_mask": mask})
        loss_sum(model, {"tokens": tokens, "labels": tokens})
