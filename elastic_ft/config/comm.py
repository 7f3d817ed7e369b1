"""What ranks send each other, in fewer bytes and no longer exactly: docs/compression.md."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from elastic_ft.config.section import Section


class CommConfig(Section):
    # Of fsdp and hsdp: gathered parameters and scattered gradients.
    compress_shards: Literal["int8"] | None = None
    # Of ddp and hsdp: gradients summed over replicas, with error feedback, which is state.
    compress_replicas: Literal["int8", "powersgd"] | None = None
    powersgd_rank: int = Field(4, ge=1, le=1024)  # of what it makes of each matrix

    @model_validator(mode="after")
    def rank_is_of_powersgd(self) -> CommConfig:
        default = type(self).model_fields["powersgd_rank"].default
        if self.powersgd_rank != default and self.compress_replicas != "powersgd":
            raise ValueError("powersgd_rank: is of compress_replicas powersgd; leave it out")
        return self

    @property
    def compresses(self) -> str | None:
        """The first key by which anything is compressed."""
        keys = ("compress_shards", "compress_replicas")
        return next((key for key in keys if getattr(self, key) is not None), None)
