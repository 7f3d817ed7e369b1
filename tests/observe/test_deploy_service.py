"""deploy/kubernetes/service.yaml, checked without a cluster: by schemas, and by what it starts."""

from __future__ import annotations

import inspect
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.kuberay.autoscaling_config import (
    _derive_autoscaling_config_from_ray_cr,
)

from elastic_ft.cli import service_commands
from elastic_ft.core.policy import Policy
from elastic_ft.hosts.ray.controller_place import LABEL
from elastic_ft.service.access import check_host
from elastic_ft.service.service_config import load_config
from tests.observe.test_deploy import documents, executable, pods, restricted, submitter

NAME = "service.yaml"
OURS = {"app.kubernetes.io/name": "elastic-ft"}


def one(kind: str, **labels: str) -> dict[str, Any]:
    (found,) = (document for document in documents(NAME) if document["kind"] == kind)
    return found


@pytest.fixture(scope="module")
def ray_job() -> dict[str, Any]:
    return one("RayJob")


@pytest.fixture(scope="module")
def cluster(ray_job: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = ray_job["spec"]["rayClusterSpec"]
    return spec


@pytest.fixture(scope="module")
def options(ray_job: dict[str, Any]) -> dict[str, str]:
    words = ray_job["spec"]["entrypoint"].split()
    assert words[:3] == ["elastic-ft", "service", "start"]
    names, values = words[3::2], words[4::2]
    assert len(names) == len(values) and all(name.startswith("--") for name in names)
    return dict(zip(names, values, strict=True))


def test_core_kinds_fit_their_schemas(
    tmp_path: Path, ray_job: dict[str, Any], cluster: dict[str, Any]
) -> None:
    core = [one for one in documents(NAME) if one["kind"] not in ("RayJob", "PodMonitor")]
    path = tmp_path / "all.yaml"
    path.write_text(yaml.safe_dump_all([*core, *pods(cluster).values(), submitter(ray_job)]))
    command = [executable("kubernetes-validate"), "--strict", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_it_starts_the_service_as_its_configuration_allows(
    options: dict[str, str], ray_job: dict[str, Any], cluster: dict[str, Any], tmp_path: Path
) -> None:
    known = {
        f"--{name.replace('_', '-')}"
        for name in inspect.signature(service_commands.start).parameters
    }
    assert options.keys() <= known
    assert ray_job["spec"]["shutdownAfterJobFinishes"] is False
    config = tmp_path / "config.yaml"
    (content,) = one("ConfigMap")["data"].values()
    config.write_text(content)
    check_host(options["--host"], load_config(config).rights)
    head, control = pods(cluster)["head"], pods(cluster)["control"]
    assert str(Path(options["--config"]).parent) in mounted(head)
    for file in ("--tls-cert", "--tls-key"):  # of the machine where the service is
        assert str(Path(options[file]).parent) in mounted(control)


def mounted(pod: dict[str, Any]) -> set[str]:
    (container,) = pod["spec"]["containers"]
    return {mount["mountPath"] for mount in container["volumeMounts"]}


def test_clients_and_prometheus_reach_the_pod_that_it_is_on(
    options: dict[str, str], cluster: dict[str, Any]
) -> None:
    groups = {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    control = groups["control"]
    assert control["rayStartParams"]["labels"] == f"{LABEL}=true"
    assert control["rayStartParams"]["num-cpus"] == "0"
    assert control["replicas"] == control["maxReplicas"] == 1, "a Service has one of them"
    pod = pods(cluster)["control"]
    (container,) = pod["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports["service"] == int(options["--port"])
    labels = pod["metadata"]["labels"].items()
    service = one("Service")["spec"]
    assert service["selector"].items() <= labels
    assert service["ports"][0]["targetPort"] == "service"
    policy = one("NetworkPolicy")["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= labels
    (rule,) = policy["ingress"]
    assert [port["port"] for port in rule["ports"]] == [ports["service"]]
    assert all("namespaceSelector" in peer for peer in rule["from"])
    monitor = one("PodMonitor")["spec"]
    assert monitor["selector"]["matchLabels"].items() <= labels
    (endpoint,) = monitor["podMetricsEndpoints"]
    assert endpoint["port"] == "service" and "authorization" in endpoint
    assert endpoint["scheme"] == "https"


def test_pods_are_restricted_and_doors_locked(
    ray_job: dict[str, Any], cluster: dict[str, Any]
) -> None:
    assert cluster["authOptions"] == {"mode": "token"}
    for pod in (*pods(cluster).values(), submitter(ray_job)):
        security = pod["spec"]["securityContext"]
        assert security["runAsNonRoot"] and security["runAsUser"]
        assert pod["spec"]["automountServiceAccountToken"] is False
        assert OURS.items() <= pod["metadata"]["labels"].items(), "network.yaml is of them"
        (container,) = pod["spec"]["containers"]
        restricted(container["securityContext"])
        assert "/tmp" in mounted(pod)


def test_ray_takes_the_cluster_and_controllers_have_time_to_stop(
    ray_job: dict[str, Any], cluster: dict[str, Any]
) -> None:
    resource = {"metadata": ray_job["metadata"], "spec": cluster}
    types = _derive_autoscaling_config_from_ray_cr(resource)["available_node_types"]
    assert types["control"]["resources"]["CPU"] == 0
    assert types["gpu"]["resources"]["GPU"] == 1
    grace_s = pods(cluster)["control"]["spec"]["terminationGracePeriodSeconds"]
    assert grace_s > Policy.stop_timeout_s
