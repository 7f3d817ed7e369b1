"""What an operator decides: the file of ``elastic-ft service start --config``. Unknown keys are
refused; what it does not say is as ``core.sharing.asks.SharingTerms`` has it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from elastic_ft.config import parse_yaml
from elastic_ft.config.job_file import FILE_BYTES_MAX
from elastic_ft.config.section import Delay, Seconds, Section
from elastic_ft.core.policy import same_names
from elastic_ft.core.sharing.asks import QueueTerms, SharingTerms
from elastic_ft.errors import ConfigError
from elastic_ft.service.access import ANY, Rights

Slots = int | None
TERMS = SharingTerms()


class QueueConfig(Section):
    """Slots: workers of one CPU (or GPU)."""

    quota: Slots = Field(None, ge=0)  # its own; none: it has what others leave
    ceiling: Slots = Field(None, ge=1)  # never more, borrowed ones included
    weight: float = Field(1.0, ge=1e-6, le=1e6)


class UserConfig(Section):
    """Who has the token may read and change jobs of these queues; "*": of all."""

    token_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")  # elastic-ft service token prints it
    read: tuple[str, ...] = (ANY,)
    write: tuple[str, ...] = ()


class ServiceConfig(Section):
    queues: dict[str, QueueConfig] = Field(default_factory=lambda: {"default": QueueConfig()})
    cooldown_s: Seconds = TERMS.cooldown_s  # a resized job grows no sooner
    ageing_s: Seconds = TERMS.ageing_s  # one priority higher after each
    starts_max: int = Field(TERMS.starts_max, ge=1)  # failed ones in a row
    retry_s: Delay = TERMS.retry_s  # after the first of them
    autoscaler: bool = TERMS.autoscaler  # the cluster has one: it is asked for what is missing
    # What is left over within a queue and a priority, among its jobs.
    surplus: Literal["by_minimum", "evenly"] = "by_minimum"
    warm: bool = False  # a template on each node, from which jobs' processes are forked

    users: dict[str, UserConfig] = Field(default_factory=dict)  # none: loopback alone, and anybody

    @property
    def rights(self) -> dict[str, Rights]:
        return {name: Rights(**user.model_dump()) for name, user in self.users.items()}

    @property
    def terms(self) -> SharingTerms:
        queues = {name: QueueTerms(**queue.model_dump()) for name, queue in self.queues.items()}
        return SharingTerms(**same_names(SharingTerms, self) | {"queues": queues})


def load_config(path: str | Path | None) -> ServiceConfig:
    """Raises ConfigError, one line."""
    if path is None:
        return ServiceConfig()
    try:
        with Path(path).open("rb") as file:
            values = parse_yaml(file.read(FILE_BYTES_MAX + 1), str(path))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        return ServiceConfig.model_validate(values or {})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"])) or "config"
        raise ConfigError(f"{key}: {first['msg']} (in {path})") from None
