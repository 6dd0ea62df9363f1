"""Kubernetes understands the manifests, and they agree with each other, the image and the command line."""

import re
from typing import Any

import pytest

from shardnet.cli.main import parse
from tests.docker.manifests import ROOT, Manifest, Pod, containers, manifest, manifests, pod_of_job, pod_of_rendezvous, templates, volumes

OLDEST = "1.31"  # in which podFailurePolicy is stable; podReplacementPolicy is beta, and on
IMAGE = (ROOT / "docker" / "Dockerfile").read_text()
RENDEZVOUS, WORKER = "rendezvous", "worker"


def name(each: Manifest) -> str:
    return f"{each['kind']} {each['metadata']['name']}"


def options(pod: Pod, container: str) -> Any:
    """The command line as `shardnet` reads it."""
    command, *words = pod.arguments(pod.container(container))
    assert command == "shardnet"
    return parse(words)


@pytest.mark.parametrize("each", manifests(), ids=name)
@pytest.mark.parametrize("version", [OLDEST, "1.37"])
def test_kubernetes_understands_it(each: Manifest, version: str) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate belongs to the dev extra")
    validator.validate(each, version, strict=True)  # raises; strict: for unknown fields, too


def test_what_is_selected_is_there() -> None:
    labels = [template["metadata"]["labels"] for template in templates()]
    policies = [each["spec"] for each in manifests() if each["kind"] == "NetworkPolicy"]
    job = pod_of_job(0).template["spec"]
    selectors: list[dict[str, str]] = [
        manifest("Service", "shardnet-rendezvous")["spec"]["selector"],
        manifest("StatefulSet", "shardnet-rendezvous")["spec"]["selector"]["matchLabels"],
        *(policy["podSelector"]["matchLabels"] for policy in policies),
        *(each["labelSelector"]["matchLabels"] for each in job["topologySpreadConstraints"]),
    ]
    for selector in selectors:
        assert sum(selector.items() <= each.items() for each in labels) == 1, selector
    callers = [source["podSelector"]["matchLabels"] for policy in policies for rule in policy["ingress"] for source in rule["from"]]
    assert all(caller.items() <= each.items() for caller in callers for each in labels)
    assert manifest("StatefulSet", "shardnet-rendezvous")["spec"]["serviceName"] == "shardnet-rendezvous"


def test_there_is_one_port() -> None:
    container = pod_of_rendezvous().container(RENDEZVOUS)
    (service,) = manifest("Service", "shardnet-rendezvous")["spec"]["ports"]
    (port,) = container["ports"]
    (rule,) = manifest("NetworkPolicy", "shardnet-rendezvous")["spec"]["ingress"][0]["ports"]
    assert port["name"] == service["targetPort"] == rule["port"]
    assert port["containerPort"] == service["port"]
    number = port["containerPort"]
    assert options(pod_of_rendezvous(), RENDEZVOUS).listen == f"0.0.0.0:{number}"
    assert options(pod_of_job(0), WORKER).rendezvous == f"shardnet-rendezvous:{number}"
    assert f"healthcheck shardnet-rendezvous:{number};" in pod_of_job(0).container("rendezvous-is-up")["command"][2]
    probes = [container[probe]["exec"]["command"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")]
    assert probes == 3 * [["healthcheck", f"127.0.0.1:{number}"]]


def test_the_job_has_as_many_pods_as_its_launchers_expect() -> None:
    job = manifest("Job", "training")["spec"]
    assert job["completions"] == job["parallelism"] == options(pod_of_job(0), WORKER).nnodes
    sources = next(volume for volume in pod_of_job(0).template["spec"]["volumes"] if volume["name"] == "certs")["projected"]["sources"]
    folders = {item["path"].split("/")[0] for source in sources for item in source["secret"]["items"]}
    mounted = {path for index in range(job["completions"]) for _, volume, path in mounts(pod_of_job(index)) if volume == "certs"}
    assert mounted == folders == {source["secret"]["name"].removeprefix("shardnet-certs-") for source in sources}


def mounts(pod: Pod) -> list[tuple[str, str, str]]:
    return [mount for container in containers(pod.template) for mount in pod.mounts(container)]


@pytest.mark.parametrize("pod", [pod_of_rendezvous(), pod_of_job(1)], ids=["rendezvous", "worker"])
def test_every_reference_leads_somewhere(pod: Pod) -> None:
    assert {volume for _, volume, _ in mounts(pod)} == {volume["name"] for volume in volumes(pod)}
    for container in containers(pod.template):
        resolved = [*pod.arguments(container), *pod.environment(container).values(), *(path for *_, path in pod.mounts(container))]
        assert not [text for text in resolved if "$(" in text]


@pytest.mark.parametrize("index", [0, 1])
def test_each_pod_is_one_of_the_machines(index: int) -> None:
    pod = pod_of_job(index)
    assert pod.environment(pod.container(WORKER))["JOB_COMPLETION_INDEX"] == str(index)
    assert options(pod, WORKER).job == "training-8c1f6c1e-0f0a-4d43-9d3e-0c7a1f1b2c3d"


@pytest.mark.parametrize("template", templates(), ids=lambda each: each["metadata"]["labels"]["app.kubernetes.io/component"])
def test_the_image_is_used_as_it_is(template: Manifest) -> None:
    uid = re.search(r"useradd --uid (\d+)", IMAGE)
    assert uid is not None
    assert template["spec"]["securityContext"]["runAsUser"] == template["spec"]["securityContext"]["fsGroup"] == int(uid[1])
    default = re.search(r"image: \$\{IMAGE:-(.*)\}", (ROOT / "compose.yaml").read_text())
    assert default is not None
    assert {container["image"] for container in containers(template)} == {default[1]}
    assert 'ENTRYPOINT ["shardnet"]' in IMAGE
    assert "COPY docker/healthcheck /package/opt/shardnet/bin/" in IMAGE


@pytest.mark.parametrize("template", templates(), ids=lambda each: each["metadata"]["labels"]["app.kubernetes.io/component"])
def test_nothing_is_allowed_that_is_not_needed(template: Manifest) -> None:
    """The profile 'restricted' of Kubernetes' Pod Security Standards, and more."""
    spec = template["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    for container in containers(template):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert "memory" in container["resources"]["limits"]
        assert "/tmp" in {mount["mountPath"] for mount in container["volumeMounts"]}  # the only writable place that Python looks for


def test_what_makes_losses_bearable() -> None:
    """podFailurePolicy requires the first two."""
    job = manifest("Job", "training")["spec"]
    assert job["template"]["spec"]["restartPolicy"] == "Never"
    assert job["podReplacementPolicy"] == "Failed"
    containers = {each["name"] for each in job["template"]["spec"]["containers"]}
    assert {rule["onExitCodes"]["containerName"] for rule in job["podFailurePolicy"]["rules"] if "onExitCodes" in rule} <= containers
    pod = pod_of_job(0)
    assert pod.environment(pod.container(WORKER))["SHARDNET_REPLACEMENT"] == "1"
    assert job["template"]["spec"]["terminationGracePeriodSeconds"] > options(pod, WORKER).grace
