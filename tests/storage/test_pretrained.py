"""A model that begins as a folder of Hugging Face's: as from_pretrained has it, or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from elastic_ft.cli.check_model import check_weights
from elastic_ft.config import ModelConfig, parse_job
from elastic_ft.core.sharding import Box
from elastic_ft.core.terms import data_terms
from elastic_ft.data.dataset import DataBundle
from elastic_ft.engines.by_reference import Reference
from elastic_ft.engines.initial_weights import load
from elastic_ft.engines.native import state_tensor
from elastic_ft.engines.pretrained import config_text, open_pretrained, resolved, with_model_read
from elastic_ft.errors import ConfigError, ModelError, StateUnreadable
from elastic_ft.faults import Points
from elastic_ft.models import build_model
from elastic_ft.models.build import computed_buffers
from elastic_ft.state.tensors import StateTensor, keyed
from elastic_ft.storage.safetensors import INDEX, SINGLE
from elastic_ft.storage.store import open_store
from elastic_ft.transport.control import Welcome
from elastic_ft.worker import prepare
from tests.oneproc.alone import attached, job_of

transformers = pytest.importorskip("transformers")
transformers.utils.logging.disable_progress_bar()  # it has a thread

SIZES = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
ROTATION = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}
MIXTURE = {"num_experts_per_tok": 2}  # a tensor for each expert in the folder, as on the Hub
MODELS = {
    "llama": {"tie_word_embeddings": True, "rope_parameters": ROTATION, "rms_norm_eps": 1e-3},
    "qwen3": {"head_dim": 8},
    "qwen3_moe": MIXTURE | {"num_experts": 4, "moe_intermediate_size": 8, "head_dim": 16},
    "qwen2_moe": MIXTURE
    | {"num_experts": 4, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8},
    "olmoe": MIXTURE | {"num_experts": 4},
    "mixtral": MIXTURE | {"num_local_experts": 4},
    "phimoe": MIXTURE | {"num_local_experts": 4},
    "granitemoe": MIXTURE | {"num_local_experts": 4},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 8},
    "deepseek_v3": MIXTURE  # its routers' biases are buffers
    | {"n_routed_experts": 4, "moe_intermediate_size": 8, "n_group": 2, "topk_group": 1}
    | {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
    | {"v_head_dim": 8, "num_key_value_heads": 2, "first_k_dense_replace": 1},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": 61},
}


def save(folder: Path, kind: str = "llama", seed: int = 7, **how: Any) -> Any:
    torch.manual_seed(seed)
    values = MODELS[kind] if kind == "gpt2" else SIZES | MODELS[kind]
    config = transformers.AutoConfig.for_model(kind, **values)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, tensor in model.state_dict().items():
        if name.endswith("correction_bias"):  # zero at first
            tensor.uniform_()
    model.save_pretrained(folder, **how)
    return model


def ours(url: str) -> nn.Module:
    config, _ = resolved(ModelConfig(pretrained=url))

    def make() -> nn.Module:
        return build_model(config, vocab_size=None, sequence_length=None)

    with torch.device("meta"):
        model = make()
    assert check_weights(url, model, "model.pretrained") is not None
    model.to_empty(device="cpu")
    model.tie_weights()  # type: ignore[operator]
    for name, value in computed_buffers(make).items():
        model.get_buffer(name).copy_(value)
    kept = {n: t for n, t in model.named_buffers() if n in model.state_dict()}
    named = dict(model.named_parameters()) | kept
    state = {f"model.{name}": state_tensor(tensor) for name, tensor in named.items()}
    load(open_pretrained(url).folder, model, state)
    return model.eval()


@pytest.mark.parametrize("kind", MODELS)
def test_it_answers_as_from_pretrained_does(tmp_path: Path, kind: str) -> None:
    save(tmp_path, kind, max_shard_size="5KB")
    assert (tmp_path / INDEX).is_file()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    tokens = torch.arange(40).reshape(2, 20)
    with torch.no_grad():
        expected, found = theirs(tokens).logits, ours(str(tmp_path))(tokens).logits
    assert torch.equal(found, expected)


def test_experts_that_do_not_make_one_tensor_are_refused(tmp_path: Path) -> None:
    save(tmp_path, "mixtral")
    load_file, save_file = safetensors.torch.load_file, safetensors.torch.save_file
    whole = load_file(tmp_path / SINGLE)
    first = "model.layers.0.block_sparse_moe.experts"
    other = {name.replace(".block_sparse_moe.", ".other."): t for name, t in whole.items()}
    for held, why in [
        ({n: t for n, t in whole.items() if n != f"{first}.2.w3.weight"}, "2.w3.weight is missing"),
        (whole | {f"{first}.4.w1.weight": torch.zeros(16, 16)}, "4.w1.weight is there, the model"),
        (whole | {f"{first}.1.w2.weight": torch.zeros(16, 9)}, r"has \[16, 24\]"),
        (other, "up_proj is there as a tensor for each expert, and"),
    ]:
        save_file(held, tmp_path / SINGLE)
        with pytest.raises(ModelError, match=why):
            ours(str(tmp_path))


@pytest.mark.parametrize("at", [(0, 0, 0), (1, 18, 3), (2, 36, 0)], ids=str)
def test_a_part_of_all_experts_is_read_from_each_ones_own(
    tmp_path: Path, at: tuple[int, ...]
) -> None:
    """Twelve rows of two experts: of the gate, of both projections, of the other one."""
    model, sizes = save(tmp_path, "mixtral"), (2, 12, 5)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    weight = model.get_parameter(name).detach()
    part = StateTensor(tuple(weight.shape), Box(at, sizes), torch.zeros(sizes))
    load(open_pretrained(str(tmp_path)).folder, model, {f"model.{name}": part})
    wanted = tuple(slice(o, o + n) for o, n in zip(at, sizes, strict=True))
    assert part.local.count_nonzero() and torch.equal(part.local, weight[wanted])


def test_each_run_of_rows_is_read(tmp_path: Path) -> None:
    """A rank may have several of a tensor: of experts, where ranks share these out."""
    model, url = save(tmp_path), str(tmp_path)
    name, weight = "model.embed_tokens.weight", model.get_input_embeddings().weight.detach()
    runs = [(2, 3), (7, 1), (40, 21)]
    pieces = keyed(
        (f"model.{name}", StateTensor((61, 16), Box((at, 4), (n, 8)), torch.zeros(n, 8)))
        for at, n in runs
    )
    load(open_pretrained(url).folder, model, pieces)
    for (at, n), piece in zip(runs, pieces.values(), strict=True):
        assert torch.equal(piece.local, weight[at : at + n, 4:12])


def test_the_digest_is_the_weights_own(tmp_path: Path, url: str) -> None:
    """Wherever they are and however divided; another bit of them, or of config.json, is others."""
    folders = [tmp_path / name for name in ("one", "many", "other")]
    save(folders[0])
    save(folders[1], max_shard_size="5KB")
    save(folders[2], seed=8)
    store = open_store(url)
    for path in folders[1].iterdir():
        store.put(path.name, path.read_bytes())
    whole, many, other = (open_pretrained(str(folder)).digest for folder in folders)
    assert whole == many == open_pretrained(url).digest != other
    config = json.loads((folders[0] / "config.json").read_text())
    (folders[0] / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    assert open_pretrained(str(folders[0])).digest != whole


def test_only_pieces_of_large_tensors_are_digested(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    large = torch.zeros(1 << 18)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    digests = []
    for at in (None, 0, len(large) - 1):
        if at is not None:
            large[at] = 1.0
        save_file({"x": large}, tmp_path / SINGLE)
        digests.append(open_pretrained(str(tmp_path)).digest)
    assert len({*digests}) == 3


def test_what_is_no_such_folder_is_refused_in_a_line(tmp_path: Path) -> None:
    def refusal() -> str:
        with pytest.raises(ModelError, match=r"^model\.pretrained: ") as caught:
            ours(str(tmp_path))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "neither model.safetensors.index.json nor model.safetensors is there" in refusal()
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    assert "has pytorch_model.bin: pickles run code as they are read" in refusal()
    save(tmp_path, max_shard_size="5KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.rename(tmp_path / "elsewhere")
    assert f"no {shard.name} there" in refusal()
    (tmp_path / "elsewhere").rename(shard)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for changes, said in (
        ({"intermediate_size": 32}, "gate_proj.weight is [24, 16], the model has [32, 16]"),
        ({"num_hidden_layers": 3}, "model.layers.2.self_attn.q_proj.weight is missing"),
        ({"model_type": "house"}, "transformers knows no model_type 'house'"),
        ({"quantization_config": {"bits": 4}}, "the weights are quantised"),
    ):
        path.write_text(json.dumps(config | changes))
        assert said in refusal()
    path.write_text("no JSON")
    assert "no config.json with a model_type is there" in refusal()


def test_what_contradicts_it_in_the_job_is_refused() -> None:
    job = {"name": "tuned", "steps": 1, "model": {"pretrained": "folder"}}
    job |= {"data": {"url": "stdlib:"}, "batch": {"global_batch_size": 64}}
    with pytest.raises(ConfigError, match=r"data\.tokenizer: required with model\.pretrained"):
        parse_job(job)
    for other in ({"preset": "decoder-1m"}, {"weights": "folder"}, {"kwargs": {"dim": 8}}):
        with pytest.raises(ConfigError, match="pretrained"):
            parse_job(job | {"model": {"pretrained": "folder"} | other})


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_a_base_that_was_replaced_is_not_read(tmp_path: Path, kind: str) -> None:
    """Also by who has found it at the start, and was given all its rows by peers since."""
    folder, model = tmp_path / "base", save(tmp_path / "base", kind)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    reference, store = Reference(str(folder), model), open_store(str(folder))
    reference.digest = open_pretrained(str(folder)).digest
    reference.open()
    joiner = Reference(str(folder), model)
    joiner.digest = reference.digest
    joiner.open()
    wanted = {f"model.{n}": state_tensor(torch.empty_like(p)) for n, p in model.named_parameters()}
    assert reference.read(store, reference.find(store), wanted) > 0
    for name, parameter in model.named_parameters():
        assert torch.equal(wanted[f"model.{name}"].local, parameter), name
    reference.find(store)  # anew: the same
    save(folder, kind, seed=8)
    for one in (reference, joiner):
        with pytest.raises(ModelError, match="other weights than the run began with"):
            one.find(store)


@pytest.mark.parametrize(("lora", "begun"), [(False, False), (False, True), (True, False)])
def test_who_may_have_to_make_step_0_needs_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: bool, begun: bool
) -> None:
    """It failed the whole job at step 0, having come in by what the others know of the folder."""
    base, nothing = tmp_path / "base", list[Any]()
    save(base)
    model = {"pretrained": str(base)} | ({"lora": {"rank": 2}} if lora else {})
    job = job_of(model=model, data={"path": "tests.multiproc.tiny:counted"})
    read, digest = with_model_read(job)
    known = data_terms(0, None, digest, config_text(read))
    base.rename(tmp_path / "elsewhere")
    bundle = DataBundle(nothing, None, 61, 8, "")
    monkeypatch.setattr(prepare, "open_dataset", lambda *_: bundle)
    made = list[Any]()

    class Made(Exception):
        """What comes after the model was read is not looked at here."""

    def engine(job: Any, *_: Any) -> None:
        made.append(job.model.transformers)
        raise Made

    monkeypatch.setattr(prepare, "_engine", engine)
    welcome = Welcome(job, "", "", ("localhost", 0), data=known, begun=begun)
    points = Points("w0", (), lambda index: None)
    with pytest.raises(Made if lora or begun else ModelError):
        prepare.prepare("w0", welcome, points, lambda message: None, lambda why: None)
    assert made == ([read.model.transformers] if lora or begun else [])


def test_step_0_is_made_of_the_weights_that_the_run_is_known_by(tmp_path: Path) -> None:
    """Ranks read at moments of their own, and again: of a folder that was replaced two models were
    mixed. One that can't be had for now ended the job."""
    base, elsewhere = tmp_path / "base", tmp_path / "elsewhere"
    saved = save(base)
    job = job_of(model={"pretrained": str(base)}, data={"path": "tests.multiproc.tiny:counted"})
    read, digest = with_model_read(job)

    def factory() -> nn.Module:
        return build_model(read.model, vocab_size=None, sequence_length=None)

    assert prepare._engine(read, DataBundle([], None, 61, 8, ""), digest).base_digest == digest
    with attached(read, factory, digest=digest) as engine:
        for name, parameter in saved.named_parameters():
            assert torch.equal(engine.state()[f"model.{name}"].local, parameter), name
        base.rename(elsewhere)
        with pytest.raises(StateUnreadable, match=r"neither .* is there"):
            engine.initialise()
        save(base, seed=8)
        with pytest.raises(StateUnreadable, match="other weights than the run began with"):
            engine.initialise()
