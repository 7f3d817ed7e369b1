"""What deploy/ holds, checked without a cluster: by Ray's own code, by schemas, by linters."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.kuberay.autoscaling_config import (
    _derive_autoscaling_config_from_ray_cr,
)

from elastic_ft.config import parse_job

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
RAY_VERSION = "2.60.0"


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text()))


@pytest.fixture(scope="module")
def config_map() -> dict[str, Any]:
    return documents("rayjob.yaml")[0]


@pytest.fixture(scope="module")
def ray_job() -> dict[str, Any]:
    return documents("rayjob.yaml")[1]


@pytest.fixture(scope="module")
def cluster(ray_job: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = ray_job["spec"]["rayClusterSpec"]
    return spec


def pods(cluster: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The templates, as the pods that they become."""
    templates = {"head": cluster["headGroupSpec"]["template"]}
    templates |= {group["groupName"]: group["template"] for group in cluster["workerGroupSpecs"]}
    return {
        name: {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, **template["metadata"]},
            "spec": template["spec"],
        }
        for name, template in templates.items()
    }


def executable(name: str) -> str:
    """Of this environment, or of the machine."""
    path = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    assert path is not None, f"{name} is in the test extra: make venv"
    return path


def test_the_job_file_in_it_is_valid(config_map: dict[str, Any]) -> None:
    job = parse_job(yaml.safe_load(config_map["data"]["job.yaml"]))
    assert job.parallel.strategy == "fsdp"


def test_rays_autoscaler_takes_the_cluster(
    ray_job: dict[str, Any], cluster: dict[str, Any], config_map: dict[str, Any]
) -> None:
    """KubeRay makes a RayCluster of the job; its groups become the autoscaler's node types."""
    resource = {"metadata": ray_job["metadata"], "spec": cluster}
    derived = _derive_autoscaling_config_from_ray_cr(resource)
    types = derived["available_node_types"]
    job = parse_job(yaml.safe_load(config_map["data"]["job.yaml"]))
    (group,) = (kind for name, kind in types.items() if name != derived["head_node_type"])
    assert group["max_workers"] == job.elastic.max_workers
    assert group["min_workers"] == job.elastic.min_workers
    assert group["resources"]["GPU"] == job.elastic.workers_per_node
    assert types[derived["head_node_type"]]["resources"]["CPU"] == 0
    assert derived["idle_timeout_minutes"] == 1.0


def test_core_kinds_fit_their_schemas(
    tmp_path: Path, config_map: dict[str, Any], cluster: dict[str, Any]
) -> None:
    for name, document in {"job": config_map, **pods(cluster)}.items():
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(document))
        done = subprocess.run(
            [executable("kubernetes-validate"), "--strict", str(path)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_misspelt_field_would_be_found(tmp_path: Path, cluster: dict[str, Any]) -> None:
    """The check itself."""
    pod = pods(cluster)["head"]
    path = tmp_path / "pod.yaml"
    path.write_text(yaml.safe_dump(pod | {"spec": pod["spec"] | {"volumess": []}}))
    command = [executable("kubernetes-validate"), "--strict", str(path)]
    assert subprocess.run(command, capture_output=True, timeout=60, check=False).returncode != 0


def test_prometheus_finds_every_pod(cluster: dict[str, Any]) -> None:
    (monitor,) = documents("podmonitor.yaml")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    starts = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for pod, group in zip(pods(cluster).values(), starts, strict=True):
        assert wanted <= pod["metadata"]["labels"].items()
        (container,) = pod["spec"]["containers"]
        (port,) = [p for p in container["ports"] if p["name"] == endpoint["port"]]
        assert group["rayStartParams"]["metrics-export-port"] == str(port["containerPort"])


def test_names_are_the_rules_on_every_path() -> None:
    """Ray puts ray_ before each name; both of its paths take it off again."""
    (monitor,) = documents("podmonitor.yaml")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    (kubernetes,) = endpoint["metricRelabelings"]
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus-ray.yml").read_text())
    (vms,) = config["scrape_configs"][0]["metric_relabel_configs"]
    for regex, target, replacement in (
        (kubernetes["regex"], kubernetes["targetLabel"], kubernetes["replacement"]),
        (vms["regex"], vms["target_label"], vms["replacement"]),
    ):
        assert (target, replacement) == ("__name__", "$1")
        match = re.fullmatch(regex, "ray_elastic_ft_loss")
        assert match is not None and match[1] == "elastic_ft_loss"
        assert re.fullmatch(regex, "ray_node_cpu") is None


def test_versions_agree(cluster: dict[str, Any]) -> None:
    assert cluster["rayVersion"] == RAY_VERSION
    assert f"ray=={RAY_VERSION}" in (ROOT / "constraints.txt").read_text()
    assert f"rayproject/ray:{RAY_VERSION}-" in (DEPLOY / "Dockerfile").read_text()


def test_the_entrypoint_is_a_command_line_of_ours(ray_job: dict[str, Any]) -> None:
    words = ray_job["spec"]["entrypoint"].split()
    assert words[:2] == ["elastic-ft", "run"]
    mounts = ray_job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"]
    assert Path(words[2]).parent == Path(mounts[0]["volumeMounts"][0]["mountPath"])


def test_the_dockerfile_is_clean_and_copies_what_there_is() -> None:
    done = subprocess.run(
        [executable("hadolint"), str(DEPLOY / "Dockerfile")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for line in (DEPLOY / "Dockerfile").read_text().splitlines():
        if line.startswith("COPY"):
            *sources, _ = [word for word in line.split()[1:] if not word.startswith("--")]
            assert all((ROOT / source).exists() for source in sources), line
