"""What deploy/ holds, checked without a cluster: by Ray's own code, by schemas, by linters."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.kuberay.autoscaling_config import (
    _derive_autoscaling_config_from_ray_cr,
)

import elastic_ft
from elastic_ft.config import parse_job

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
RAY_VERSION = "2.60.0"


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text()))


def of_kind(kind: str, name: str = "rayjob.yaml") -> list[dict[str, Any]]:
    return [document for document in documents(name) if document["kind"] == kind]


@pytest.fixture(scope="module")
def config_map() -> dict[str, Any]:
    (found,) = of_kind("ConfigMap")
    return found


@pytest.fixture(scope="module")
def ray_job() -> dict[str, Any]:
    (found,) = of_kind("RayJob")
    return found


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
    tmp_path: Path, ray_job: dict[str, Any], cluster: dict[str, Any]
) -> None:
    ours = [d for d in documents("rayjob.yaml") if d["kind"] != "RayJob"]
    policies = documents("network.yaml")
    checked = [*ours, *policies, *pods(cluster).values(), submitter(ray_job)]
    path = tmp_path / "all.yaml"
    path.write_text(yaml.safe_dump_all(checked))
    done = subprocess.run(
        [executable("kubernetes-validate"), "--strict", str(path)],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def submitter(ray_job: dict[str, Any]) -> dict[str, Any]:
    """The pod that hands the entrypoint to the head."""
    template = ray_job["spec"]["submitterPodTemplate"]
    metadata = {"name": "submitter", **template["metadata"]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def test_no_pod_may_more_than_it_must(ray_job: dict[str, Any], cluster: dict[str, Any]) -> None:
    """What the restricted pod security standard asks for, and a root that nobody writes."""
    for pod in (*pods(cluster).values(), submitter(ray_job)):
        security = pod["spec"]["securityContext"]
        assert security["runAsNonRoot"] and security["runAsUser"]
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        (container,) = pod["spec"]["containers"]
        restricted(container["securityContext"])
        tag = container["image"].partition(":")[2]
        assert tag not in ("", "latest")
        for amounts in container["resources"].values():
            assert amounts.keys() >= {"cpu", "memory", "ephemeral-storage"}
        mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert "/tmp" in mounted, "Ray writes there, and the root is read-only"
        assert "envFrom" not in container, "no key is in an environment: the role has them"
    restricted(cluster["autoscalerOptions"]["securityContext"])


def restricted(security: dict[str, Any]) -> None:
    assert security["allowPrivilegeEscalation"] is False
    assert security["readOnlyRootFilesystem"] is True
    assert security["capabilities"] == {"drop": ["ALL"]}


def test_a_stop_has_the_time_that_it_takes(
    cluster: dict[str, Any], config_map: dict[str, Any]
) -> None:
    """The head has the controller: a clean stop is a checkpoint, then the last lines."""
    from elastic_ft.controller.job_policy import policy_of

    job = parse_job(yaml.safe_load(config_map["data"]["job.yaml"]))
    policy = policy_of(job)
    head = cluster["headGroupSpec"]["template"]["spec"]
    assert head["terminationGracePeriodSeconds"] > policy.stop_timeout_s
    for group in cluster["workerGroupSpecs"]:
        grace_s = group["template"]["spec"]["terminationGracePeriodSeconds"]
        # Its step ends, or somebody hangs and that is noticed.
        assert grace_s > job.elastic.hang_timeout_s + policy.pause_timeout_s


def test_every_disruption_budget_is_of_pods_that_there_are(cluster: dict[str, Any]) -> None:
    found = {name: pod["metadata"]["labels"].items() for name, pod in pods(cluster).items()}
    budgets = {}
    for budget in of_kind("PodDisruptionBudget"):
        wanted = budget["spec"]["selector"]["matchLabels"].items()
        (name,) = [name for name, labels in found.items() if wanted <= labels]
        budgets[name] = budget["spec"]["maxUnavailable"]
    assert budgets == {"head": 0, "gpu": 1}


def test_the_network_policy_is_of_every_pod_and_lets_nobody_else_in(
    ray_job: dict[str, Any], cluster: dict[str, Any]
) -> None:
    (policy,) = documents("network.yaml")
    ours = policy["spec"]["podSelector"]["matchLabels"]
    for pod in (*pods(cluster).values(), submitter(ray_job)):
        assert ours.items() <= pod["metadata"]["labels"].items()
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    (own, *others) = policy["spec"]["ingress"]
    assert own == {"from": [{"podSelector": {"matchLabels": ours}}]}
    for rule in others:
        assert all("namespaceSelector" in peer for peer in rule["from"]) and rule["from"]
        assert rule["ports"], "others have one port each"
    ports = {port["port"] for rule in others for port in rule["ports"]}
    (head,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    assert ports <= {port["containerPort"] for port in head["ports"]}


def test_rays_doors_are_locked(cluster: dict[str, Any], ray_job: dict[str, Any]) -> None:
    """Ray takes jobs from whoever reaches it, unless it asks for a token (KubeRay 1.5.1)."""
    assert cluster["authOptions"] == {"mode": "token"}
    accounts = {account["metadata"]["name"] for account in of_kind("ServiceAccount")}
    for name, pod in pods(cluster).items():
        assert pod["spec"]["serviceAccountName"] in accounts
        mounts_token = pod["spec"].get("automountServiceAccountToken", True)
        assert mounts_token == (name == "head"), "the autoscaler's alone talks to Kubernetes"
    assert submitter(ray_job)["spec"]["automountServiceAccountToken"] is False


def test_a_misspelt_field_would_be_found(tmp_path: Path, cluster: dict[str, Any]) -> None:
    """The check itself."""
    pod = pods(cluster)["head"]
    path = tmp_path / "pod.yaml"
    path.write_text(yaml.safe_dump(pod | {"spec": pod["spec"] | {"volumess": []}}))
    command = [executable("kubernetes-validate"), "--strict", str(path)]
    assert subprocess.run(command, capture_output=True, timeout=150, check=False).returncode != 0


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
    assert f"elastic-ft:{elastic_ft.__version__}" in (DEPLOY / "Dockerfile").read_text()


REQUIREMENT = re.compile(
    r"^([a-z0-9][a-z0-9.-]*)==(\S+) \\\n((?: +--hash=sha256:[0-9a-f]{64}.*\n)+)"
)


def test_the_images_requirements_are_pinned_by_hash_and_as_tested() -> None:
    text = "".join(path.read_text() for path in DEPLOY.glob("requirements*.txt"))
    assert "://" not in text, "no registry is named: pip's own configuration does"
    lines = [line for line in text.splitlines(keepends=True) if not line.startswith("#")]
    rest, found = "".join(lines), {}
    while rest:
        match = REQUIREMENT.match(rest)
        assert match is not None, rest[:200]
        found[match[1]] = match[2]
        rest = rest[match.end() :]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for requirement in project["dependencies"]:
        name = re.split(r"[\[<>=]", requirement)[0]
        assert name in found, f"{name}: python deploy/lock.py"
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        name, _, version = line.partition("==")
        assert found.get(name, version) == version, f"{name} is tested at {version}"


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
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for line in (DEPLOY / "Dockerfile").read_text().splitlines():
        if line.startswith("COPY"):
            *sources, _ = [word for word in line.split()[1:] if not word.startswith("--")]
            assert all((ROOT / source).exists() for source in sources), line
