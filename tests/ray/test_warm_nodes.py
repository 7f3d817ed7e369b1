"""Ray's processes are forked from a node's template, and are what they would have been."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from typing import Any

import psutil
import ray
from in_charge import alive
from ray.util.placement_group import placement_group, remove_placement_group

from elastic_ft.hosts.ray import fork_client, fork_server, setup_worker
from elastic_ft.hosts.ray.cluster import LocalCluster, wait_for
from elastic_ft.hosts.ray.local_templates import local_executable
from elastic_ft.hosts.ray.ray_private import RAY_NODE_ID_KEY
from elastic_ft.hosts.ray.started_by import environment_by
from elastic_ft.hosts.ray.warm_nodes import WarmNodes

SOON_S = 120.0


class Look:
    def about(self) -> dict[str, Any]:
        group = placement_group([{"CPU": 0.01}])
        remove_placement_group(group)
        return {
            "pid": os.getpid(),
            "parents": [parent.pid for parent in psutil.Process().parents()],
            "arena": os.environ.get("MALLOC_ARENA_MAX"),
            "mine": os.environ.get("MINE"),
            "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
            "drawn": group.id.hex(),
            "torch": "torch" in sys.modules,
            "nice": os.nice(0),
        }


def test_processes_are_forked_from_a_template() -> None:
    with LocalCluster(1) as cluster:
        cluster.connect()
        (node,) = cluster.node_ids
        warm = WarmNodes(lambda: [node])
        warm.start()
        made: list[Any] = []

        def look(**variables: str) -> dict[str, Any]:
            environment = environment_by(warm.executable(), variables)
            where = {RAY_NODE_ID_KEY: node}
            actor = ray.remote(runtime_env=environment, label_selector=where, num_cpus=0)(Look)
            made.append(actor.remote())
            return dict(ray.get(made[-1].about.remote(), timeout=SOON_S))

        first, second = look(), look()
        (template,) = {first["parents"][0]} & {second["parents"][0]}
        with socket.socket(socket.AF_UNIX) as link:  # who is stopped is not waited for
            link.connect(fork_client.name_of(node))
            assert fork_client.listener_of(link) == template
        assert cluster.raylet_pid(node) in first["parents"]
        assert first["torch"] and first["arena"] == "1" and first["interrupt"]
        assert first["drawn"] != second["drawn"]  # of ids, each draws its own

        # Whose libraries would have read another environment is no fork, but it comes.
        other = look(MINE="yes")
        assert other["mine"] == "yes" and template not in other["parents"]
        assert first["nice"] == other["nice"]  # Ray's own, once: not the template's, and again

        # A template that is killed takes nobody along, and is followed by another.
        os.kill(template, signal.SIGKILL)
        assert psutil.pid_exists(first["pid"]) and psutil.pid_exists(second["pid"])

        def forked_again() -> bool:
            return look()["parents"][0] not in (template, cluster.raylet_pid(node))

        wait_for(forked_again, SOON_S, "another template")
        warm.close()

        # What was forked ends with its node, that of a template before this one, too.
        forked = [first["pid"], second["pid"], look()["pid"]]
        os.kill(cluster.raylet_pid(node), signal.SIGKILL)
        wait_for(lambda: not any(map(psutil.pid_exists, forked)), SOON_S, "they have ended")


def test_processes_of_local_nodes_are_forked_from_one_that_imported() -> None:
    """And end with their node, whose raylet is not their parent."""
    with LocalCluster(2) as cluster:
        cluster.connect()
        made: list[Any] = []

        def look(node: str) -> dict[str, Any]:
            environment, where = environment_by(local_executable(), {}), {RAY_NODE_ID_KEY: node}
            actor = ray.remote(runtime_env=environment, label_selector=where, num_cpus=0)(Look)
            made.append(actor.remote())
            return dict(ray.get(made[-1].about.remote(), timeout=SOON_S))

        found = {node: look(node) for node in cluster.node_ids}
        one, other = found.values()
        assert one["torch"] and one["arena"] == "1" and one["drawn"] != other["drawn"]
        assert one["parents"][0] != other["parents"][0]  # each node's template, and what made them
        assert one["parents"][1] == other["parents"][1] != os.getpid()
        assert {cluster.node_of_pid(about["pid"]): about for about in found.values()} == found

        node, left = cluster.node_ids
        cluster.kill_node(node)
        assert not alive(one["pid"]) and alive(other["pid"])

        # Without its template a node starts Python: nobody comes to nobody's socket.
        os.kill(other["parents"][0], signal.SIGKILL)
        assert alive(other["pid"])
        cold = look(left)
        assert cluster.raylet_pid(left) in cold["parents"] and not cold["torch"]
        forked = [other["pid"], *one["parents"][:2], *other["parents"][:2]]
    wait_for(lambda: not any(map(alive, forked)), SOON_S, "they have ended")


def test_a_worker_of_a_local_node_is_set_up_as_ray_does() -> None:
    """Its environment and its program; what is asked for beyond those is left to Ray's script."""
    context = {"env_vars": {"A": "1", "B": "${A}2${NONE}"}, "py_executable": "env --null"}
    said = ["--language=PYTHON", f"--serialized-runtime-env-context={json.dumps(context)}"]
    command = [sys.executable, setup_worker.__file__, *said, "A=0"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert {"A=0", "B=12"} <= set(printed.split("\0"))
    context = {"env_vars": {"A": "1"}, "command_prefix": ["true;"], "py_executable": "env"}
    said[1] = f"--serialized-runtime-env-context={json.dumps(context)}"
    command = [sys.executable, setup_worker.__file__, *said]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "A=1" in printed.split()


def test_what_libraries_read_decides() -> None:
    mine = {"LD_LIBRARY_PATH": "/a", "RAY_JOB_ID": "1", "RAY_X": "1", "OMP_NUM_THREADS": "1"}
    assert fork_server.differing(mine, mine | {"RAY_X": "2", "OMP_NUM_THREADS": "4"}) == []
    assert fork_server.differing(mine, mine | {"RAY_JOB_ID": "2"}) == ["RAY_JOB_ID"]
    assert fork_server.differing(mine, {"HOME": "/"}) == ["HOME", "LD_LIBRARY_PATH", "RAY_JOB_ID"]


def test_the_node_is_known_by_the_worker_s_arguments() -> None:
    arguments = ["default_worker.py", "--node-ip-address=192.0.2.1", "--node-id=ab12", "--x=y"]
    assert fork_client.node_in(arguments) == "ab12"
    assert fork_client.node_in(["default_worker.py"]) == ""
