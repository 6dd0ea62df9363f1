"""compose.yaml says the same as the image, the command line and docs/compose.md. `make compose-test` runs it."""

import re
import shlex
from typing import Any

import pytest
import yaml

from options import parse_options
from shardnet.cli.main import parse
from tests.docker.manifests import ROOT

TEXT = (ROOT / "compose.yaml").read_text()
IMAGE = (ROOT / "docker" / "Dockerfile").read_text()
PAGE = (ROOT / "docs" / "compose.md").read_text()
VARIABLE = re.compile(r"\$\{(\w+):-([^}]*)\}")


def services() -> dict[str, Any]:
    """The services, as Compose reads them if no variable is set."""
    found: dict[str, Any] = yaml.safe_load(VARIABLE.sub(lambda match: match[2], TEXT))["services"]
    return found


def words(service: str) -> list[str]:
    return shlex.split(services()[service]["command"])


def test_a_node_is_two_ranks_of_an_elastic_training() -> None:
    options = parse(words("node"))
    assert (options.command, options.nproc, options.min_workers) == ("run", 2, 2)
    assert options.nnodes > services()["node"]["deploy"]["replicas"] == 2, "there must be room for a node that is started later"
    assert (ROOT / options.script).exists()
    assert parse_options([word for word in options.args if word != "--"]).steps == 50


def test_the_rendezvous_is_where_nodes_look_for_it() -> None:
    options = parse(words("rendezvous"))
    host, port = parse(words("node")).rendezvous.split(":")
    assert host in services()
    assert options.listen == f"0.0.0.0:{port}"
    assert options.until_done
    assert f"{host}:{port}" in services()["node"]["healthcheck"]["test"]
    assert f"127.0.0.1:{port}" in services()[host]["healthcheck"]["test"]


def test_a_node_with_gpus_is_a_node() -> None:
    plain, gpu = services()["node"], services()["node-gpu"]
    assert gpu.pop("profiles") == ["gpu"]
    (reserved,) = gpu.pop("deploy")["resources"]["reservations"]["devices"]
    assert reserved == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    plain.pop("deploy")
    assert gpu == plain


@pytest.mark.parametrize("service", services().values(), ids=services())
def test_nothing_is_allowed_that_is_not_needed(service: dict[str, Any]) -> None:
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not service.keys() & {"ports", "privileged", "user", "cap_add", "pid", "ipc"}
    assert service.get("network_mode") == "none" or service["networks"] == ["cluster"]


def test_nobody_is_reached_from_outside_or_reaches_out() -> None:
    assert yaml.safe_load(TEXT)["networks"] == {"cluster": {"internal": True}}


def test_one_service_writes_the_token_and_others_read_it() -> None:
    (maker,) = (name for name, service in services().items() if "token:/run/shardnet" in service["volumes"])
    for name, service in services().items():
        if name != maker:
            assert "token:/run/shardnet:ro" in service["volumes"]
            assert service["environment"] == {"SHARDNET_TOKEN_FILE": "/run/shardnet/token"}
            assert service["depends_on"][maker] == {"condition": "service_completed_successfully"}


def test_every_volume_hides_a_folder_of_the_images_user() -> None:
    made = re.search(r"install --directory --owner shardnet --mode 700 (.*)$", IMAGE, re.MULTILINE)
    assert made is not None
    mounted = {volume.split(":")[1] for service in services().values() for volume in service["volumes"]}
    assert mounted == set(made[1].split())


def test_the_page_has_every_variable_and_its_default() -> None:
    for name, default in VARIABLE.findall(TEXT):
        assert f"`{name}`" in PAGE or f"`{name}=" in PAGE, name
        if default.isdecimal() and name != "GPU_NODES":
            assert re.search(rf"^\| `{name}` \| .*: {default}\b", PAGE, re.MULTILINE), name
