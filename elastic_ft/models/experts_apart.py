"""A mixture's weights as files on the Hub have them: a tensor for each expert and projection, and
by names of their own.

transformers' modules have one for all experts of a layer, gate and up projections in one.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass

ALL, EACH = ".experts.", ".experts.0."
# What a layer's mixture is called in files, and an expert's projections by the module's name.
FAMILIES = {
    ".mlp.": {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)},
    ".block_sparse_moe.": {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)},
}
# Parts of names in modules, and in files: of Phi-MoE, Mixtral, GraniteMoE, and ERNIE 4.5.
OTHERWISE = (
    (".mlp.router.", ".block_sparse_moe.gate."),
    (".mlp.", ".block_sparse_moe."),
    (".block_sparse_moe.router.", ".block_sparse_moe.router.layer."),
    (".block_sparse_moe.experts.gate_up_proj", ".block_sparse_moe.input_linear.weight"),
    (".block_sparse_moe.experts.down_proj", ".block_sparse_moe.output_linear.weight"),
    (".mlp.gate.moe_statics.", ".mlp.moe_statics."),
)


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """A tensor of a folder, and where it lies in the model's.

    Attributes:
        at: the index of the model's first dimensions, which the folder's tensor does not have.
        row: of the next dimension, at which it begins.
        shape: that it must have.
    """

    name: str
    shape: tuple[int, ...]
    at: tuple[int, ...] = ()
    row: int = 0


def names_in_files(name: str) -> Iterator[str]:
    """What a module's tensor may be called."""
    yield name
    for part, in_files in OTHERWISE:
        if part in name:
            yield name.replace(part, in_files)


def pieces_of(
    name: str, shape: tuple[int, ...], found: Container[str]
) -> tuple[StoredPiece, ...] | None:
    """Those that all experts' tensor ``name`` is put together from; None if it is no such tensor,
    or its first expert's are not in the folder. Others may be missing there. Where the folder has
    more experts than the model, one of these is among them.
    """
    before, _, projection = name.rpartition(ALL)
    for mixture, names in FAMILIES.items():
        parts = names.get(projection, ())
        prefix = f"{before}.".replace(".mlp.", mixture).removesuffix(".")
        if not before or len(shape) < 2 or f"{prefix}{EACH}{(*parts, '')[0]}.weight" not in found:
            continue
        experts, rows = shape[0], shape[1] // len(parts)
        one_more = f"{prefix}{ALL}{experts}.{parts[0]}.weight"
        return tuple(
            StoredPiece(
                f"{prefix}{ALL}{expert}.{part}.weight", (rows, *shape[2:]), (expert,), at * rows
            )
            for expert in range(experts + (one_more in found))
            for at, part in enumerate(parts)
        )
    return None
