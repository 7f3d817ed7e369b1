"""What all systems have in common, and what each of them is told beside its defaults."""

from __future__ import annotations

from typing import Any

WORKERS = 4
WORKERS_MIN = 1
MICRO_BATCHES = 8  # of one sample each: the global batch
HANG_S = 10.0  # a collective, or a silent worker, is given up after so long, by every system
FORM_S = 60.0  # forming a process group takes at most so long
DRAIN_NOTICE_S = 8.0  # from the notice until the node is gone
CHECKPOINT_EVERY_STEPS = 50
FAULT_PHASE = 27  # steps after a checkpoint at which faults happen: half way to the next
STEPS = 1_000_000  # more than anyone comes to

# Beside the defaults; each is a documented option of its system. Kept with the raw results.
TUNED: dict[str, dict[str, str]] = {
    "elastic_ft": {"heartbeat_timeout_s, hang_timeout_s": f"{HANG_S:g}"},
    "ray_train": {
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
        "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": f"{HANG_S:g}",
        "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "0.5",
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": f"{HANG_S:g}",  # else 60 for a lost node's place
        "elastic_resize_monitor_interval_s": "1",
        "timeout of collectives": f"{HANG_S:g} s; of forming, TorchConfig.timeout_s: {FORM_S:g}",
        "RAY_health_check_{initial_delay,period,timeout}_ms, failure_threshold": (
            "1000, 500, 1000, 3"
        ),
    },
    "torchft": {
        "lighthouse": "quorum_tick_ms 50, join_timeout_ms 1000, heartbeat_timeout_ms 1000",
        "ProcessGroupGloo(timeout)": "5 s, as in its train_ddp example",
        "Manager(timeout, quorum_timeout)": "10 s, 60 s",
        "Manager(init_sync)": "False: equal seeds",
    },
    "torchrun": {
        "--monitor-interval": "0.1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1: without, workers find the last round's keys",
        "--shutdown-timeout": "2",
        "--rdzv-conf": "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=5",
        "--rdzv-endpoint": "a store on no node (is_host=0): it survives whichever is lost",
        "timeout of collectives": f"{HANG_S:g} s; of forming, init_process_group: {FORM_S:g}",
    },
}


def make_job(**changes: Any) -> dict[str, Any]:
    """The job of elastic_ft, from which the peers' training script takes all it needs."""
    job: dict[str, Any] = {
        "name": "peers",
        "steps": STEPS,
        "model": {"preset": "decoder-1m"},
        "data": {
            "url": "stdlib:",
            "vocab_size": 1024,
            "sequence_length": 64,
            "max_tokens": 500_000,
        },
        "optimizer": {"name": "adamw", "lr": 1e-3, "schedule": "cosine", "warmup_steps": 20},
        "batch": {"global_batch_size": MICRO_BATCHES, "micro_batch_size": 1},
        "parallel": {"strategy": "ddp"},
        "elastic": {
            "min_workers": WORKERS_MIN,
            "max_workers": WORKERS,
            "gather_s": 120,
            "heartbeat_timeout_s": HANG_S,
            "hang_timeout_s": HANG_S,
            "max_generations_without_progress": 100,
        },
        "checkpoint": {"every_steps": CHECKPOINT_EVERY_STEPS, "every_s": None, "final": False},
        "audit": True,
    }
    return job | changes
