"""What a job survives, and how: its workers, snapshots, checkpoints, network."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from elastic_ft.config.section import (
    PORTS,
    WORKERS_MAX,
    Count,
    CountFrom0,
    Delay,
    Seconds,
    Section,
    Workers,
    refused_for,
)
from elastic_ft.core.policy import Policy


class ElasticConfig(Section):
    """Who may take part, and how long to wait for what. What the core decides by has its defaults
    in ``core.policy.Policy``."""

    min_workers: Workers = 1  # with fewer the job is suspended
    max_workers: Workers = 1  # no world is larger
    workers_per_node: Workers = 1  # that a node holds
    # Worlds are multiples of this, the rest stays warm; none: of parallel.tp x pp x cp, which are
    # then never lowered. Given, they are, in worlds that they do not divide.
    multiple_of: Workers | None = None
    # Kept warm beside max_workers, to take a lost one's place.
    spares: int = Field(Policy.spares, ge=0, le=WORKERS_MAX)
    # Until min_workers are ready; on Ray, also from each worker's place to its process, and from
    # there until it has made its imports and called; on plain processes, for their launcher's.
    start_timeout_s: Seconds = Policy.start_timeout_s
    gather_s: Delay = Policy.gather_s  # at the start: wait so long for more than min_workers
    join_batch_s: Delay = Policy.join_batch_s  # joiners that come together join together
    # Below min_workers; then it ends as suspended.
    suspend_timeout_s: Seconds = Policy.suspend_timeout_s
    # Survivors to reach a safe point once aborted.
    pause_timeout_s: Seconds = Policy.pause_timeout_s
    # Forming plus re-sharding, without a byte of state.
    form_timeout_s: Seconds = Policy.form_timeout_s
    # No progress inside a step; three times as long as a step takes, if that is longer.
    hang_timeout_s: Seconds = 60
    heartbeat_timeout_s: Seconds = 10  # nothing at all from a worker
    # Without a controller, workers train on and look for the next one; then they save and end.
    controller_timeout_s: Seconds = Policy.controller_timeout_s
    # On Ray: two nodes have made a controller's imports, and are replaced when lost (0.5 GB each).
    standby: bool = False
    # In a row, broken with every member alive; and as many with a loss on one and the same node.
    max_generations_without_progress: Count = Policy.max_generations_without_progress
    # Retries, until a step goes by without an exception.
    max_user_failures: CountFrom0 = Policy.max_user_failures
    # Unfit workers, before it is avoided: for 10 minutes, with each more for twice as long.
    max_node_failures: Count = Policy.max_node_failures
    # A joiner must be worth its pause within that.
    regrow_repaid_s: Seconds = Policy.regrow_repaid_s
    regrow_delay_max_s: Delay = Policy.regrow_delay_max_s  # and waits at most so long if it is not
    evict_stragglers: bool = Policy.evict_stragglers  # replace one, or go on without it
    # Slower by this than the median of all members.
    straggler_factor: float = Field(Policy.straggler_factor, gt=1)
    # Nine of ten of them must have been slow.
    straggler_window_steps: int = Field(Policy.straggler_window_steps, ge=2, le=100_000)
    # On Ray: whose preemption notices drain a node; auto: the cloud's that its firmware names.
    notices: Literal["auto", "aws", "gcp", "azure", "none"] = "auto"

    @property
    def workers_wanted(self) -> int:
        """At most: the world's and the spares."""
        return self.max_workers + self.spares

    @refused_for
    def ordered(self) -> Iterator[str]:
        if self.min_workers > self.max_workers:
            yield f"min_workers {self.min_workers} is greater than max_workers {self.max_workers}"

    @refused_for
    def some_world(self) -> Iterator[str]:
        each = self.multiple_of or 1
        if self.max_workers // each * each < self.min_workers:
            yield (
                f"no multiple of {each} is between min_workers {self.min_workers} and "
                f"max_workers {self.max_workers}"
            )


class SnapshotConfig(Section):
    """Of sharded layouts, to host memory and to buddies."""

    every_steps: Count | Literal["auto"] = "auto"  # auto: by measured cost
    max_cost: float = Field(0.01, gt=0, lt=1)  # auto: share of the step time
    max_steps: Count = 50  # auto: at most; what a failure may make redo
    copies: int = Field(Policy.copies, ge=1, le=8)  # of each shard, on as many nodes
    # Ray node label of what fails together: a rack, a zone. Or several, the outermost first.
    domain_label: str | tuple[str, ...] | None = None

    @property
    def domain_labels(self) -> tuple[str, ...]:
        label = self.domain_label
        return (label,) if isinstance(label, str) else label or ()


class CheckpointConfig(Section):
    url: str | None = None  # any fsspec URL; none: checkpoints/ in the run folder
    every_steps: CountFrom0 = 0  # one after so many steps; 0: not by steps
    # One after so many seconds; auto: as Young and Daly have it; null: not by time.
    every_s: Seconds | Literal["auto"] | None = "auto"
    final: bool = True  # one at the end of the job
    keep_last: Count = Policy.keep_last  # of the newest steps; older ones are deleted
    # Each is read back once, by the controller and a few objects at a time, before an older one is
    # deleted for it. Without, their lengths are all that is known of shards before someone reads.
    read_back: bool = True
    keep_for_h: float | None = Field(None, gt=0)  # and whatever is younger than that
    # Begin anew from the seed where no checkpoint is good, although steps are recorded. It is said
    # for one start: the run folder's job.yaml leaves it out.
    from_scratch: bool = Policy.from_scratch
    max_upload_mb_per_s: float | None = Field(None, gt=0)  # per worker, in 10^6 bytes; none: no cap


class NetworkConfig(Section):
    """Where the job's own processes listen. The ports of Gloo and NCCL are the kernel's choice."""

    ports: str | None = Field(None, pattern=PORTS)  # "20000-20099"; none: any
    metrics_address: str = "127.0.0.1"  # of the controller's machine; 0.0.0.0: all it has
    tls: bool = False  # around our own connections, under a certificate made for this start

    @refused_for
    def some_ports(self) -> Iterator[str]:
        found = self.port_range
        if found is not None and not (found and found[0] >= 1024 and found[-1] <= 65535):
            yield f"ports {self.ports!r} are not between 1024 and 65535, in this order"

    @property
    def port_range(self) -> range | None:
        """Every socket that we listen at has one of these ports, if there are any."""
        if self.ports is None:
            return None
        first, last = map(int, self.ports.split("-"))
        return range(first, last + 1)


class FaultConfig(Section):
    """Faults to inject: off by default. See chaos/ for scenarios."""

    scenario: str | None = None  # file of a scenario
