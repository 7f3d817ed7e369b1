"""From the job's ``model`` section to a module, its initial state and its repeated blocks.

The device is the caller's: under ``torch.device("meta")`` nothing is allocated. A meta model gets
its parameters and persistent buffers from ``initial_state`` (or a checkpoint), its other buffers,
which are functions of the configuration, from ``computed_buffers``.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from elastic_ft.config import LoraSection, ModelConfig
from elastic_ft.core.sharding import Box
from elastic_ft.errors import ModelError, one_line
from elastic_ft.models.decoder import PRESETS, Decoder, DecoderConfig
from elastic_ft.models.experts import MIXTURES, MixtureConfig, MixtureDecoder
from elastic_ft.models.imports import call_object
from elastic_ft.models.initial import Recipe, recorded
from elastic_ft.models.lora import add_adapters

ModelFactory = Callable[[], nn.Module]
WHOLE_ELEMENTS = 1 << 26  # of a model that each rank builds whole to begin from the seed
log = logging.getLogger(__name__)

# In configurations on the Hub, and not in transformers' own any more: it converts them, or they
# mean nothing to a decoder.
CONVERTED = ("rope_theta", "rope_scaling", "partial_rotary_factor")
UNDECLARED = ("head_dim",)  # read by the code of some models whose configuration does not have it
MEANINGLESS = ("n_ctx", "task_specific_params", "_name_or_path", "_attn_implementation_autoset")
MEANINGLESS += ("auto_map",)  # where on the Hub code is: transformers' own is taken


def build_model(
    config: ModelConfig, *, vocab_size: int | None, sequence_length: int | None
) -> nn.Module:
    """Returns the module that ``config`` describes, on the caller's default device.

    ``vocab_size`` and ``sequence_length`` are the data's, None where the data has none. A preset
    takes them unless its kwargs say otherwise, a transformers model takes the vocabulary if its
    configuration has none, a custom callable gets its kwargs and nothing else.
    Trained parameters are float32: in less, an update that is small beside its weight is lost.
    Raises ModelError, one line.
    """
    if config.preset is not None:
        return _build_preset(config.preset, config.kwargs, vocab_size, sequence_length)
    if config.path is not None:
        return _build_custom(config.path, config.kwargs)
    if config.transformers is None:
        raise ModelError("model.pretrained: its config.json was not read")
    return _build_transformers(config.transformers, vocab_size, sequence_length, config.lora)


def _check_trained_in_full(key: str, model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
            raise ModelError(
                f"{key}: {name} is {parameter.dtype}: trained parameters are float32, and "
                "precision.dtype says what is computed in"
            )


def _build_preset(
    preset: str, kwargs: dict[str, Any], vocab_size: int | None, sequence_length: int | None
) -> nn.Module:
    named = preset_of(preset)
    known = [field.name for field in dataclasses.fields(named)]
    for key in kwargs:
        if key not in known:
            raise ModelError(f"model.kwargs.{key}: unknown key; expected {', '.join(known)}")
    from_data = {"vocab_size": vocab_size, "max_sequence_length": sequence_length}
    given = {key: value for key, value in from_data.items() if value is not None}
    try:
        sizes = dataclasses.replace(named, **(given | kwargs))
    except ValueError as error:
        raise ModelError(f"model.kwargs: {error}") from None
    _check_fits("model.kwargs.vocab_size", sizes.vocab_size, vocab_size)
    _check_fits("model.kwargs.max_sequence_length", sizes.max_sequence_length, sequence_length)
    return MixtureDecoder(sizes) if isinstance(sizes, MixtureConfig) else Decoder(sizes)


def preset_of(name: str) -> DecoderConfig:
    """Raises ModelError."""
    known = PRESETS | MIXTURES
    if name not in known:
        raise ModelError(f"model.preset: expected one of {', '.join(known)}; found {name!r}")
    return known[name]


def _check_fits(key: str, models: object, datas: int | None) -> None:
    if isinstance(models, int) and datas is not None and models < datas:
        raise ModelError(f"{key}: {models} is smaller than the data's {datas}")


def _build_custom(path: str, kwargs: dict[str, Any]) -> nn.Module:
    model = call_object(path, kwargs, "model.path", ModelError)
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"model.path: {path} returned {type(model).__name__}, expected a torch.nn.Module"
        )
    _check_trained_in_full("model.path", model)
    return model


def _build_transformers(
    given: dict[str, Any],
    vocab_size: int | None,
    sequence_length: int | None,
    lora: LoraSection | None = None,
) -> nn.Module:
    (AutoConfig, AutoModelForCausalLM), mapping = _transformers("model.transformers")
    values = dict(given)
    model_type = values.pop("model_type", None)
    if model_type is None:
        raise ModelError("model.transformers.model_type: required key is missing, e.g. llama")
    if model_type not in mapping:
        raise ModelError(
            f"model.transformers.model_type: transformers knows no {model_type!r}; "
            "expected a name such as llama, qwen3 or gpt2"
        )
    try:
        defaults = AutoConfig.for_model(model_type)
        values = _known(values, defaults, model_type)
        values["use_cache"] = False  # the cache serves generation; here it costs memory
        if vocab_size is not None:
            values.setdefault("vocab_size", vocab_size)
        config = AutoConfig.for_model(model_type, **values)
        _check_fits("model.transformers.vocab_size", config.vocab_size, vocab_size)
        length_max = getattr(config, "max_position_embeddings", None)
        _check_fits("model.transformers.max_position_embeddings", length_max, sequence_length)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        _check_taken(model, defaults, values, model_type)
        _check_trained_in_full("model.transformers", model)
        return model if lora is None else add_adapters(model, lora)
    except ModelError:
        raise
    except Exception as error:  # transformers raises errors of many packages
        raise ModelError(f"model.transformers: {one_line(error)}") from error


def _transformers(key: str) -> tuple[tuple[Any, Any], Mapping[str, Any]]:
    """The package's factories of configurations and models; configurations by type of model."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ImportError as error:
        raise ModelError(
            f"{key}: needs the transformers extra: pip install "
            f"'elastic-ft[transformers]' ({one_line(error)})"
        ) from error
    return (AutoConfig, AutoModelForCausalLM), CONFIG_MAPPING


def known_settings(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Of a config.json, what transformers' configuration of its ``model_type`` knows, for
    ``model.transformers``: the rest means nothing to the model. Raises ModelError."""
    _, mapping = _transformers(key)
    if (kind := values.get("model_type")) not in mapping:
        raise ModelError(f"{key}: config.json: transformers knows no model_type {kind!r}")
    if values.get("quantization_config") is not None:
        raise ModelError(f"{key}: config.json: quantization_config: the weights are quantised")
    defaults = mapping[kind]()
    kept = {"model_type", *CONVERTED, *UNDECLARED}
    return {name: v for name, v in values.items() if name in kept or hasattr(defaults, name)}


def configuration(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> bytes:
    """The config.json of a ``model.transformers``, with which ``from_pretrained`` takes weights of
    these ``shapes``, by their names. Raises ModelError."""
    if config.transformers is None:
        raise ModelError("model.transformers: this job has another model: no config.json tells it")
    if config.lora is not None:
        raise ModelError("model.lora: the checkpoint has its adapter alone: --format peft")
    with torch.device("meta"):
        made = build_model(config, vocab_size=None, sequence_length=None)
        words = made.get_input_embeddings().weight  # type: ignore[operator]
        (name,) = (name for name, p in made.named_parameters() if p is words)
        if name not in shapes:
            raise ModelError(f"model.transformers: the checkpoint has no {name}")
        made = build_model(config, vocab_size=shapes[name][0], sequence_length=None)
    differing = [n for n, p in made.named_parameters() if shapes.get(n) != tuple(p.shape)]
    if differing:
        found = shapes.get(differing[0])
        raise ModelError(f"model.transformers: {differing[0]} is {found} in the checkpoint")
    made.config.architectures = [type(made).__name__]  # type: ignore[union-attr]
    return bytes(made.config.to_json_string().encode())  # type: ignore[union-attr, operator]


def _known(values: dict[str, Any], defaults: Any, model_type: str) -> dict[str, Any]:
    """Without what does not matter here; transformers itself keeps unknown keys without a word."""
    known = {"attn_implementation", "torch_dtype", "dtype", *UNDECLARED, *MEANINGLESS}
    if hasattr(defaults, "rope_parameters"):
        known.update(CONVERTED)
    for key in values:
        if key not in known and not hasattr(defaults, key):
            raise _unknown(key, model_type)
    left_out = {"torch_dtype", "dtype", *MEANINGLESS}
    return {key: value for key, value in values.items() if key not in left_out}


def _check_taken(
    model: nn.Module, defaults: Any, values: Mapping[str, Any], model_type: str
) -> None:
    """Raises ModelError for a key that neither the configuration has nor the model's code reads."""
    for key in values.keys() & {*UNDECLARED}:
        taken = any(getattr(part, key, None) == values[key] for part in model.modules())
        if not taken and not hasattr(defaults, key):
            raise _unknown(key, model_type)


def _unknown(key: str, model_type: str) -> ModelError:
    return ModelError(f"model.transformers.{key}: unknown key for {model_type}")


def block_modules(model: nn.Module) -> list[nn.Module]:
    """Returns the repeated blocks to shard and to checkpoint one by one; disjoint, in order.

    Those that a transformers model names in ``_no_split_modules``, else the children of the
    ModuleList, or failing that the Sequential, that repeats one type of block most heavily (by
    number of parameters). Empty if nothing repeats.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    named = [module for module in model.modules() if type(module).__name__ in names]
    if named:
        return _outermost(named)
    for container in (nn.ModuleList, nn.Sequential):
        candidates = [
            _repeated(list(module.children()))
            for module in model.modules()
            if isinstance(module, container)
        ]
        best = max(candidates, key=lambda blocks: sum(map(_size, blocks)), default=[])
        if best:
            return best
    return []


def _outermost(modules: list[nn.Module]) -> list[nn.Module]:
    inner = {id(part) for module in modules for part in module.modules() if part is not module}
    return [module for module in modules if id(module) not in inner]


def _repeated(children: list[nn.Module]) -> list[nn.Module]:
    """The children whose type occurs at least twice among those with parameters."""
    children = [child for child in children if _size(child) > 0]
    counts = Counter(type(child) for child in children)
    return [child for child in children if counts[type(child)] > 1]


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def initial_state(model_factory: ModelFactory, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, CPU tensor) for every parameter and persistent buffer, in the model's order.

    See ``initial_parts``. Tied tensors come once, under the name ``named_parameters`` gives them.
    """
    with torch.device("meta"):
        skeleton = model_factory()
    wanted = {name: [Box.whole(tuple(tensor.shape))] for name, tensor in _persistent(skeleton)}
    return ((name, part) for name, _, part in initial_parts(model_factory, seed, wanted))


def initial_parts(
    model_factory: ModelFactory, seed: int, wanted: Mapping[str, Iterable[Box]]
) -> Iterator[tuple[str, Box, Tensor]]:
    """Yields (name, box, CPU tensor) for the boxes ``wanted`` of parameters and buffers.

    A function of ``seed`` alone. A model with ``initial_part(name, shape, seed, box)`` or
    ``initial_tensor(name, shape, seed)`` is asked, one tensor in memory at a time. Any other of up
    to WHOLE_ELEMENTS is built whole on the CPU with torch's generator seeded, which is put back
    afterwards: as ``torch.manual_seed(seed)`` would make it. A larger one's parts are made by
    themselves, as recorded, unless it fills a tensor with what another one has.
    """
    with torch.device("meta"):
        skeleton = model_factory()
    tensors = dict(_persistent(skeleton))
    make = _maker(model_factory, skeleton, tensors, seed)
    for name, tensor in tensors.items():
        for box in wanted.get(name, ()):
            yield name, box, make(name, box).to(tensor.dtype)


def _maker(
    model_factory: ModelFactory, skeleton: nn.Module, tensors: Mapping[str, Tensor], seed: int
) -> Callable[[str, Box], Tensor]:
    initial_part: Any = getattr(skeleton, "initial_part", None)
    if initial_part is not None:
        return lambda name, box: initial_part(name, tensors[name].shape, seed, box)
    initial_tensor: Any = getattr(skeleton, "initial_tensor", None)
    if initial_tensor is not None:
        return lambda name, box: _cut_out(initial_tensor(name, tensors[name].shape, seed), box)
    if sum(tensor.numel() for tensor in tensors.values()) > WHOLE_ELEMENTS:
        try:
            recipes = _recipes(model_factory)
            return lambda name, box: recipes[name].part(seed, name, box)
        except Exception as error:  # the user's code may raise anything of fake tensors
            log.warning(
                "model: each rank builds all of it to begin, as its parts can't be made by "
                "themselves without initial_tensor(name, shape, seed): %s",
                one_line(error),
            )
    whole = dict(_persistent(_seeded(model_factory, seed)))
    return lambda name, box: _cut_out(whole[name], box)


def _cut_out(whole: Tensor, box: Box) -> Tensor:
    return whole[box.slices_within(Box.whole(tuple(whole.shape)))]


def _recipes(model_factory: ModelFactory) -> dict[str, Recipe]:
    """How a model fills each of its parameters and persistent buffers."""
    model, recorder = recorded(model_factory)
    recipes = {}
    for name, tensor in _persistent(model):
        recipe = recorder.recipe(tensor)
        if recipe is None:
            raise ModelError(f"{name} begins with what another tensor has")
        recipes[name] = recipe
    return recipes


def _seeded(model_factory: ModelFactory, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed CUDA as well
        return model_factory()


def _persistent(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        yield name, parameter.detach()
    computed = _computed_names(model)
    for name, buffer in model.named_buffers():
        if name not in computed:
            yield name, buffer


def _computed_names(model: nn.Module) -> set[str]:
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }


def computed_buffers(model_factory: ModelFactory) -> dict[str, Tensor]:
    """Returns the CPU values of the non-persistent buffers, by name; {} where there are none.

    No checkpoint holds them (rotary frequencies, masks), and ``to_empty`` leaves them undefined.
    Parameters are dropped as they are made, so this takes the memory of one tensor at a time.
    """
    with torch.device("meta"):
        names = _computed_names(model_factory())
    if not names:
        return {}
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), _parameters_on_meta():
        model = model_factory()
    return {name: buffer for name, buffer in model.named_buffers() if name in names}


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules built inside keep real buffers and no parameter data (accelerate does the same)."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore
