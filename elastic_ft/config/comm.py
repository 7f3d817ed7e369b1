"""What ranks send each other, in fewer bytes and no longer exactly: docs/compression.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from elastic_ft.config.section import Section, refused_for


class CommConfig(Section):
    # Of fsdp and hsdp: gathered parameters and scattered gradients.
    compress_shards: Literal["int8"] | None = None
    # Of ddp and hsdp: gradients summed over replicas, with error feedback, which is state.
    compress_replicas: Literal["int8", "powersgd"] | None = None
    powersgd_rank: int = Field(4, ge=1, le=1024)  # of what it makes of each matrix

    @refused_for
    def rank_is_of_powersgd(self) -> Iterator[str]:
        default = type(self).model_fields["powersgd_rank"].default
        if self.powersgd_rank != default and self.compress_replicas != "powersgd":
            yield "powersgd_rank: is of compress_replicas powersgd; leave it out"

    @property
    def compresses(self) -> str | None:
        """The first key by which anything is compressed."""
        keys = ("compress_shards", "compress_replicas")
        return next((key for key in keys if getattr(self, key) is not None), None)
