"""A head whose autoscaler is Ray's own: it starts and ends real nodes on this machine.

What Ray has for that (``ray.cluster_utils.AutoscalingCluster``) ends every Ray process of the
machine, and needs a file that its package lacks. This has the same autoscaler and the same provider
of nodes, and ends what it has started.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.autoscaler._private.fake_multi_node import node_provider

from chaos.free_ports import free_ports
from elastic_ft.hosts.ray import ray_private, setup_worker
from elastic_ft.hosts.ray.cluster import (
    OBJECT_STORE_BYTES,
    SYSTEM_CONFIG,
    wait_for,
    worker_environment,
)
from elastic_ft.hosts.ray.controller_place import LABEL
from elastic_ft.observe import scratch

END_S = 60.0
LISTS = (
    "initialization_commands",
    "setup_commands",
    "head_setup_commands",
    "worker_setup_commands",
    "head_start_ray_commands",
    "worker_start_ray_commands",
    "cluster_synced_files",
    "rsync_exclude",
    "rsync_filter",
)


def autoscaling(nodes_max: int, gcs_address: str, idle_s: float) -> dict[str, Any]:
    """Nodes of one CPU."""
    head, node = "ray.head.default", "ray.worker.cpu"
    resources = {"CPU": 1, "object_store_memory": OBJECT_STORE_BYTES}
    return {
        "cluster_name": "autoscaled",
        "max_workers": nodes_max,
        "provider": {
            "type": "external",  # else it wants a file of defaults that Ray's package lacks
            "module": f"{node_provider.__name__}.{node_provider.FakeMultiNodeProvider.__name__}",
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
            "gcs_address": gcs_address,
        },
        "available_node_types": {
            head: {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            node: {
                "resources": resources,
                "node_config": {},
                "min_workers": 0,
                "max_workers": nodes_max,
            },
        },
        "head_node_type": head,
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": idle_s / 60,
        "auth": {},
        "docker": {},
        "file_mounts": {},
        "file_mounts_sync_continuously": False,
        **{name: [] for name in LISTS},
    }


class AutoscaledCluster:
    """A head without CPUs, and up to ``nodes_max`` nodes of one CPU as they are asked for.

    Attributes:
        address: for ``ray.init``.
    """

    def __init__(
        self, nodes_max: int, idle_s: float, version: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """``version``: of Ray's autoscaler, 1 or 2, which is what KubeRay has by now."""
        self._folder = Path(scratch.make("efa-", "/tmp"))
        # The kernel ends the head with the thread that started it.
        self._starter = ThreadPoolExecutor(1)
        (port,) = free_ports(1)
        config = self._folder / "autoscaling.json"
        host = ray.util.get_node_ip_address()
        config.write_text(json.dumps(autoscaling(nodes_max, f"{host}:{port}", idle_s)))
        environment = worker_environment()
        for name, value in (environment | {"RAY_FAKE_CLUSTER": "1"}).items():
            monkeypatch.setenv(name, value)  # of the autoscaler, and so of the nodes
        monkeypatch.setenv("AUTOSCALER_UPDATE_INTERVAL_S", "1")

        def start() -> Any:
            return ray_private.start_node(
                head=True,
                num_cpus=0,
                num_gpus=0,
                include_dashboard=False,
                dashboard_port=0,
                gcs_server_port=port,
                autoscaling_config=str(config),
                temp_dir=str(self._folder),
                object_store_memory=OBJECT_STORE_BYTES,
                labels={LABEL: "true"},
                env_vars=environment
                | dict.fromkeys(
                    ("RAY_OVERRIDE_NODE_ID_FOR_TESTING", "RAY_CLOUD_INSTANCE_ID"),
                    node_provider.FAKE_HEAD_NODE_ID,
                ),
                setup_worker_path=setup_worker.__file__,
                _system_config=SYSTEM_CONFIG | {"enable_autoscaler_v2": version == 2},
            )

        self._head = self._starter.submit(start).result()
        self.address = str(self._head.gcs_address)

    def raylets(self) -> list[psutil.Process]:
        """Of nodes that the autoscaler has started."""
        found = []
        for process in self._started():
            with contextlib.suppress(psutil.Error):
                if process.name() == "raylet" and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def _started(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            monitor = self._head.all_processes["monitor"][0].process.pid
            return psutil.Process(monitor).children(recursive=True)
        return []

    def log(self) -> str:
        """Of the autoscaler, its end."""
        found = sorted(self._folder.glob("session_2*/logs/monitor*"))
        return "\n".join(f"{path.name}: {path.read_text()[-3000:]}" for path in found)

    def close(self) -> None:
        """Leaves no process and no file behind."""
        started = self._started()
        for kind in self._head.all_processes.values():
            for info in kind:
                with contextlib.suppress(psutil.NoSuchProcess):
                    started += psutil.Process(info.process.pid).children(recursive=True)
        self._head.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)
        for process in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        wait_for(lambda: not any(map(_lives, started)), END_S, "what it started ends")
        self._starter.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
