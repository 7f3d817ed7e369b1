"""What kernels of GPUs ask of what they are given, held without a GPU: by kernels of the CPU that
ask the same, by tensors without numbers, and by what no step may do: wait for its device."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from elastic_ft.core.layouts.layout import Layout
from elastic_ft.engines import shared_positions
from elastic_ft.engines.expert_parallel import shard_experts
from elastic_ft.errors import ConfigError
from elastic_ft.models import context_parallel
from elastic_ft.models.context_parallel import ContextShare
from elastic_ft.models.expert_exchange import ExpertShare, how_many
from elastic_ft.models.experts import MIXTURES, Experts, MixtureDecoder, is_grouped
from elastic_ft.torch_private import TorchDispatchMode, pretended_world
from tests.oneproc.gpu_jobs import make_job

ATEN: Any = torch.ops.aten
GPU = torch.device("cuda", 0)


class Unwaited(TorchDispatchMode):
    """Fails where numbers are asked for, or brought to the device, for which a thread waits: on a
    GPU these are the operations that do."""

    WAITING = ("_local_scalar_dense", "nonzero", "bincount", "unique", "_to_copy", "lift_fresh")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        moves = name != "_to_copy" or "device" in (kwargs or {})
        assert not (name in self.WAITING and moves), f"{name} would wait for the device"
        return func(*args, **(kwargs or {}))


# ----------------------------------------------------------------------- attention over ranks


def _check_flash(*tensors: Tensor) -> None:
    """As mha_fwd and mha_bwd of torch's flash_api.cpp do."""
    for x in tensors:
        assert x.dtype == tensors[0].dtype in (torch.bfloat16, torch.float16), x.dtype
        assert x.stride(-1) == 1, "contiguous last dimension"
        assert x.shape[-1] % 8 == 0, "head_size must be a multiple of 8"
        assert x.shape[-1] <= 256


def _forward(q: Tensor, k: Tensor, v: Tensor, dropout: float, causal: bool, *, scale: float) -> Any:
    _check_flash(q, k, v)
    name = ATEN._scaled_dot_product_flash_attention_for_cpu
    return (*name(q, k, v, dropout, causal, scale=scale), None, None, 0, 0, None, None, None)


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *more: Any,
    scale: float,
) -> Any:
    _check_flash(dout, q, k, v, out)
    none_q, none_k, longest_q, longest_k, dropout, causal, _, _ = more
    assert (none_q, none_k, longest_q, longest_k) == (None, None, q.shape[2], k.shape[2])
    assert lse.dtype is torch.float32 and lse.is_contiguous()
    name = ATEN._scaled_dot_product_flash_attention_for_cpu_backward
    return name(dout, q, k, v, out, lse, dropout, causal, scale=scale)


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's kernel, as picky as that of GPUs."""
    names = {"": _forward, "_backward": _backward}
    kernels = {f"_scaled_dot_product_flash_attention{n}": f for n, f in names.items()}
    monkeypatch.setattr(context_parallel, "_ops", SimpleNamespace(**kernels))
    monkeypatch.setattr(context_parallel, "_is_on_cpu", lambda tensor: False)


def _attended(width: int, kind: Any, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(width)
    q, k, v, dout = (torch.randn(2, 3, 8, width, generator=generator).to(dtype) for _ in range(4))
    out, lse = context_parallel._attention(q, k, v, kind, None)
    found = context_parallel._attention_backward(dout, q, out, lse, k, v, kind, None)
    return [out, lse, *found]


@pytest.mark.parametrize("kind", ["causal", "all", "backwards"])
@pytest.mark.parametrize("width", [20, 32])  # decoder-1m's heads are of 20
def test_heads_of_any_width_fit_flash_attention(
    request: pytest.FixtureRequest, width: int, kind: str
) -> None:
    expected = _attended(width, kind, torch.bfloat16)
    request.getfixturevalue("flash")
    for found, as_expected in zip(_attended(width, kind, torch.bfloat16), expected, strict=True):
        assert found.shape == as_expected.shape and found.dtype == as_expected.dtype
        torch.testing.assert_close(found, as_expected, rtol=2e-2, atol=2e-2)


def test_attention_over_ranks_takes_what_torch_says_of_gpus() -> None:
    """Without numbers: names and arguments of its private kernels."""
    with FakeTensorMode():
        q, k, v = (torch.empty(2, 4, 16, 20, dtype=torch.bfloat16, device=GPU) for _ in range(3))
        out, lse = context_parallel._attention(q, k, v, "causal", None)
        assert (out.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:3], torch.float32)
        found = context_parallel._attention_backward(out, q, out, lse, k, v, "causal", None)
        assert [x.shape for x in found] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize(
    ("dtype", "found", "why"),
    [
        ("bf16", (7, 5), r"needs a GPU of sm_80 or newer, found sm_75"),
        ("fp32", (9, 0), r"needs precision\.dtype bf16 or fp16"),
        ("bf16", (9, 0), None),
    ],
)
def test_a_gpu_without_flash_attention_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, dtype: str, found: tuple[int, int], why: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found)
    job = make_job(precision={"dtype": dtype}, parallel={"strategy": "fsdp", "cp": 2})
    if why is None:
        shared_positions.check_kernels(job, GPU)
        return
    with pytest.raises(ConfigError, match=rf"^parallel\.cp: .*{why}"):
        shared_positions.check_kernels(job, GPU)


@dataclasses.dataclass(frozen=True)
class Alone(ContextShare):
    """One of two ranks, of which the other has the same."""

    group: Any = None
    ranks: int = 2
    rank: int = 1


@pytest.fixture
def doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(whole: Tensor, own: Tensor, group: Any) -> None:
        whole.copy_(torch.cat([own, own]))

    def scatter(own: Tensor, whole: Tensor, group: Any) -> None:
        assert whole.is_contiguous()
        own.copy_(whole.chunk(2)[1])

    monkeypatch.setattr(context_parallel, "_all_gather", gather)
    monkeypatch.setattr(context_parallel, "_reduce_scatter", scatter)


def test_chunks_of_ranks_are_put_in_order_without_a_wait(doubled: None) -> None:
    own = torch.arange(4.0).view(1, 1, 1, 4, 1).expand(2, 3, 2, 4, 1)  # positions: chunks 1 and 2
    with Unwaited():
        whole, back = Alone().gather(own), Alone().scatter(torch.arange(8.0).view(1, 1, 1, 8, 1))
    assert whole[0, 0, 0, :, 0].tolist() == [0, 1, 0, 1, 2, 3, 2, 3]
    assert back.flatten().tolist() == [2, 3, 4, 5]


def test_layers_ask_once_where_documents_are(doubled: None) -> None:
    """Of a batch all ask the same, and each answer is waited for."""
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 2, 2], [0, 0, 1, 1, 1, 1, 1, 1]])
    first = context_parallel._spans(documents, 8)
    with Unwaited():
        assert context_parallel._spans(documents, 8) is first
    assert context_parallel._spans(documents.clone(), 8) == first
    assert len(first) == 5


# ---------------------------------------------------------------------------------- experts


def test_tokens_are_counted_and_placed_without_a_wait() -> None:
    chosen = torch.tensor([[4, 0], [4, 1], [0, 4]])
    share = ExpertShare(None, (2, 0, 1, 0, 1))  # type: ignore[arg-type]
    places = share.slots(chosen)  # the first layer brings the table
    with Unwaited():
        counted, again = how_many(chosen, 6), share.slots(chosen)
    assert counted.tolist() == [2, 1, 0, 0, 3, 0]
    assert torch.equal(again, places)


@pytest.mark.parametrize(("width", "inner"), [(16, 8), (16, 12), (20, 8), (128, 128)])
def test_experts_are_one_product_where_the_kernel_takes_them(width: int, inner: int) -> None:
    """Of torch's own checks for GPUs: rows begin at multiples of 16 bytes."""
    with FakeTensorMode():
        x = torch.empty(5, width, dtype=torch.bfloat16, device=GPU)
        gate = torch.empty(3, width, inner, dtype=torch.bfloat16, device=GPU)
        ends = torch.empty(3, dtype=torch.int32, device=GPU)

        def product() -> Tensor:
            middle = F.grouped_mm(x, gate, offs=ends)
            back = F.grouped_mm(middle, gate.transpose(1, 2), offs=ends)
            F.grouped_mm(x.t(), middle, offs=ends)  # the weight's gradient
            return back

        assert is_grouped(x, gate) == (width % 8 == inner % 8 == 0)
        if is_grouped(x, gate):
            assert product().shape == x.shape
        else:
            with pytest.raises(RuntimeError, match="multiple of 16 bytes"):
                product()


@pytest.mark.parametrize("counts", [[3, 0, 2], [0, 5, 0]])
@pytest.mark.parametrize("autocast", [False, True])
def test_experts_by_one_product_are_experts_one_by_one(
    monkeypatch: pytest.MonkeyPatch, counts: list[int], autocast: bool
) -> None:
    """Gradients, too, also of who gets no token. Under autocast as with DDP: weights are fp32."""
    import elastic_ft.models.experts as module

    dtype = torch.float32 if autocast else torch.bfloat16
    config = dataclasses.replace(MIXTURES["decoder-moe-4m"], n_experts=3, dim=16, expert_ffn_dim=8)
    made = []
    for one_kernel in (False, True):
        monkeypatch.setattr(module, "is_grouped", lambda x, weight, is_so=one_kernel: is_so)
        torch.manual_seed(0)
        experts = Experts(config).to(dtype)
        for weight in experts.parameters():
            torch.nn.init.normal_(weight, std=0.3)
        x = torch.randn(5, 16).to(dtype).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            out = experts(x, torch.tensor(counts))
        assert out.dtype is torch.bfloat16
        out.float().square().sum().backward()
        assert x.grad is not None and experts.gate.grad is not None
        made.append([out, x.grad, *(weight.grad for weight in experts.parameters())])
    for alone, together in zip(*made, strict=True):
        torch.testing.assert_close(alone, together, rtol=2e-2, atol=2e-2)
    assert not experts.gate.grad[counts.index(0)].any()


class Spoiled(torch.autograd.Function):
    """A grouped product as on Blackwell."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        return F.grouped_mm(x, weight, offs=ends)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight, ends = ctx.saved_tensors
        counts = ends.diff(prepend=ends.new_zeros(1)).tolist()
        parts = [
            a.t() @ b for a, b in zip(x.split(counts), gradients[0].split(counts), strict=True)
        ]
        spoiled = [
            p if n else torch.full_like(p, math.nan) for p, n in zip(parts, counts, strict=True)
        ]
        dx = F.grouped_mm(gradients[0], weight.transpose(1, 2).contiguous(), offs=ends)
        return dx, torch.stack(spoiled), None


@pytest.mark.parametrize("capability", [(9, 0), (10, 0)])
def test_an_expert_without_tokens_has_a_gradient_of_zero(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    """Blackwell's kernel writes none for it (pytorch#172439): what was in its memory stays."""
    import elastic_ft.models.experts as module

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    module.spoils_empty_groups.cache_clear()
    spoils = module.spoils_empty_groups(GPU)
    module.spoils_empty_groups.cache_clear()
    assert spoils is (capability >= (10, 0))
    product = (lambda x, w, offs: Spoiled.apply(x, w, offs)) if spoils else F.grouped_mm
    monkeypatch.setattr(module, "F", SimpleNamespace(silu=F.silu, grouped_mm=product))
    monkeypatch.setattr(module, "is_grouped", lambda x, weight: True)
    monkeypatch.setattr(module, "spoils_empty_groups", lambda device: spoils)
    config = dataclasses.replace(MIXTURES["decoder-moe-4m"], n_experts=3, dim=16, expert_ffn_dim=8)
    experts = Experts(config).to(torch.bfloat16)
    for weight in experts.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    experts(torch.randn(5, 16).bfloat16(), torch.tensor([3, 0, 2])).square().sum().backward()
    for weight in experts.parameters():
        assert weight.grad is not None and bool(weight.grad.isfinite().all())
        assert weight.grad[0].any() and not weight.grad[1].any()


class Copies(TorchDispatchMode):
    """Sizes of what FSDP2 copies out of what it has gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.fsdp.split_with_sizes_copy.default:
            self.sizes.append(args[0].numel())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("owners", [(1, 1, 1), (0, 1, 1)])
def test_a_rank_without_experts_gathers_nothing(owners: tuple[int, ...]) -> None:
    """On a GPU torch's kernel divides by how much there is, which ends the process (SIGFPE)."""
    layout, none = Layout(dp_shard=4, ep=2, owners=owners), 0 not in owners
    with pretended_world(4), Copies() as copies:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
        config = dataclasses.replace(
            MIXTURES["decoder-moe-4m"], n_experts=3, dim=16, expert_ffn_dim=8, n_layers=1
        )
        with torch.device("meta"):
            model = MixtureDecoder(config)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        shard_experts(model, mesh, layout, {"mp_policy": policy, "reshard_after_forward": True})
        experts = model.layers[0].ffn.experts.to_empty(device="cpu")
        own = owners.count(0)
        x = torch.ones(0 if none else 2, 16, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(2):
            experts(x, torch.full((own,), len(x))).sum().backward()
        assert x.grad is not None and x.grad.shape == x.shape
        assert len(list(experts.parameters())) == 3
    assert copies.sizes == ([] if none else [3 * 16 * 8] * 4)
