"""The manifests of docker/kubernetes, as the API server and the kubelet read them."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docker" / "kubernetes"
Manifest = dict[str, Any]


def manifests() -> list[Manifest]:
    return [document for path in sorted(FOLDER.glob("*.yaml")) for document in yaml.safe_load_all(path.read_text())]


def manifest(kind: str, name: str) -> Manifest:
    (found,) = (each for each in manifests() if (each["kind"], each["metadata"]["name"]) == (kind, name))
    return found


def templates() -> list[Manifest]:
    """The templates of all pods."""
    return [each["spec"]["template"] for each in manifests() if "template" in each["spec"]]


def containers(template: Manifest) -> list[Manifest]:
    return [*template["spec"].get("initContainers", ()), *template["spec"]["containers"]]


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Expand $(NAME) for variables that exist; others stay, as Kubernetes leaves them."""
    return re.sub(r"\$\((\w+)\)", lambda match: variables.get(match[1], match[0]), text)


@dataclass(frozen=True)
class Pod:
    """One pod of a template.

    labels, annotations  including those that its controller adds
    """

    template: Manifest
    labels: Mapping[str, str]
    annotations: Mapping[str, str]

    def container(self, name: str) -> Manifest:
        (found,) = (each for each in containers(self.template) if each["name"] == name)
        return found

    def environment(self, container: Manifest) -> dict[str, str]:
        """Its variables with references resolved. Each variable may refer to earlier ones."""
        found: dict[str, str] = {}
        for each in container.get("env", ()):
            found[each["name"]] = expand(each["value"], found) if "value" in each else self._refer(each["valueFrom"], container)
        return found

    def arguments(self, container: Manifest) -> list[str]:
        """The command line, after the image's entry point unless the manifest gives its own command."""
        environment = self.environment(container)
        words = container["command"] if "command" in container else ["shardnet", *container["args"]]
        return [expand(word, environment) for word in words]

    def mounts(self, container: Manifest) -> Iterator[tuple[str, str, str]]:
        """(path in the container, volume, path in the volume) of each."""
        environment = self.environment(container)
        for mount in container["volumeMounts"]:
            yield mount["mountPath"], mount["name"], expand(mount.get("subPathExpr", ""), environment)

    def _refer(self, source: Manifest, container: Manifest) -> str:
        ((kind, reference),) = source.items()
        if kind == "resourceFieldRef":
            group, resource = reference["resource"].split(".")
            return str(container["resources"][group][resource])
        match = re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", reference["fieldPath"])
        assert kind == "fieldRef", source
        assert match is not None, source
        return (self.labels if match[1] == "labels" else self.annotations)[match[2]]


def pod_of_job(index: int, uid: str = "8c1f6c1e-0f0a-4d43-9d3e-0c7a1f1b2c3d") -> Pod:
    """A pod as the Job controller makes it."""
    template = manifest("Job", "training")["spec"]["template"]
    own = {"batch.kubernetes.io/controller-uid": uid, "batch.kubernetes.io/job-name": "training"}
    number = {"batch.kubernetes.io/job-completion-index": str(index)}
    return Pod(template, template["metadata"]["labels"] | own | number, number)


def pod_of_rendezvous() -> Pod:
    template = manifest("StatefulSet", "shardnet-rendezvous")["spec"]["template"]
    return Pod(template, template["metadata"]["labels"], {})


def volumes(pod: Pod) -> list[Manifest]:
    """The volumes that the template names, and those that a StatefulSet claims for each of its pods."""
    (owner,) = (each["spec"] for each in manifests() if each["spec"].get("template") == pod.template)
    return [*pod.template["spec"]["volumes"], *({"name": claim["metadata"]["name"]} for claim in owner.get("volumeClaimTemplates", ()))]


def volume_files(pod: Pod, name: str, objects: Mapping[str, Mapping[str, bytes]]) -> dict[str, bytes]:
    """What is in a volume at first: content by path. `objects` are Secrets and ConfigMaps; raises KeyError for one that is not there."""
    (volume,) = (each for each in volumes(pod) if each["name"] == name)
    if "secret" in volume:
        return dict(objects[volume["secret"]["secretName"]])
    if "configMap" in volume:
        return dict(objects[volume["configMap"]["name"]])
    sources = [source["secret"] for source in volume.get("projected", {}).get("sources", ())]
    return {item["path"]: objects[source["name"]][item["key"]] for source in sources for item in source["items"]}
