"""`shardnet certs`, and the commands that use what it makes."""

import re
from pathlib import Path

import pytest

from shardnet.cli.arguments import Parser
from shardnet.cli.main import main
from shardnet.cli.protection import Protection
from shardnet.credentials import Identity, Role
from shardnet.credentials.folder import load
from shardnet.credentials.token import new_token
from tests.cli.launched import Launched, script, shardnet


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs") / "cluster"
    assert main(["certs", "init", str(folder)]) == 0
    assert main(["certs", "issue", str(folder), "node-0", "--job", "lm"]) == 0
    assert main(["certs", "issue", str(folder), "me", "--operator"]) == 0
    return folder


def test_init_says_what_comes_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certs", "init", str(tmp_path / "new")]) == 0
    said = capsys.readouterr().out
    assert f"shardnet rendezvous --certs {tmp_path}/new/rendezvous --listen HOST:PORT" in said
    assert f"shardnet certs issue {tmp_path}/new NAME --job ID" in said
    assert load(tmp_path / "new/rendezvous").identity == Identity(Role.RENDEZVOUS, "rendezvous")


@pytest.mark.parametrize(
    ("options", "identity"),
    [
        ([], Identity(Role.WORKER, "x", "default")),
        (["--job", "lm"], Identity(Role.WORKER, "x", "lm")),
        (["--any-job"], Identity(Role.WORKER, "x")),
        (["--operator"], Identity(Role.OPERATOR, "x")),
        (["--rendezvous"], Identity(Role.RENDEZVOUS, "x")),
        (["--host", "10.0.0.1", "--host", "node.example.org"], Identity(Role.WORKER, "x", "default")),
    ],
)
def test_issue(tmp_path: Path, options: list[str], identity: Identity, capsys: pytest.CaptureFixture[str]) -> None:
    main(["certs", "init", str(tmp_path)])
    assert main(["certs", "issue", str(tmp_path), "x", "--days", "30", *options]) == 0
    assert load(tmp_path / "x").identity == identity
    assert f"{tmp_path}/x is for {identity}, until " in capsys.readouterr().out
    assert main(["certs", "show", str(tmp_path / "x")]) == 0
    assert re.fullmatch(rf"{re.escape(str(identity))}, until \d{{4}}-\d\d-\d\d \d\d:\d\d UTC \(29 days\)\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (
            ["issue", "{}/nowhere", "x"],
            "shardnet certs: cannot read {}/nowhere/authority.pem: No such file or directory; make it with `shardnet certs init`",
        ),
        (["issue", "{}", "node-0"], "shardnet certs: {}/node-0/authority.pem exists and is never overwritten"),
        (["issue", "{}", "../x"], "shardnet certs: NAME must be usable as a folder's name, without '/', and not '.' or '..', got '../x'"),
        (["issue", "{}", "y", "--days", "9999999"], "shardnet certs: cannot make this certificate"),
        (["issue", "{}", "y", "--days", "4000"], "shardnet certs: the authority itself expires on"),
        (["init", "{}/new", "--days", "9999999"], "shardnet certs: cannot make this certificate"),
        (["init", "{}"], "shardnet certs: {}/authority.pem exists"),
        (
            ["show", "{}/x"],
            "shardnet certs: cannot read {}/x/authority.pem: No such file or directory; make it with `shardnet certs issue`",
        ),
        (
            ["show", "{}"],
            "shardnet certs: {} is the folder of an authority; name the folder of one certificate in it, such as {}/rendezvous",
        ),
    ],
)
def test_what_cannot_be_done_is_one_line_with_status_2(
    cluster: Path, given: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["certs", *(word.format(cluster) for word in given)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(complaint.replace("{}", str(cluster)))
    assert error.count("\n") == 1
    assert not (cluster / "new").exists()


def test_a_long_name_of_any_script(tmp_path: Path) -> None:
    main(["certs", "init", str(tmp_path)])
    assert main(["certs", "issue", str(tmp_path), 40 * "я"]) == 0
    assert load(tmp_path / (40 * "я")).identity.name == 40 * "я"


def test_a_token_is_new_every_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certs", "token"]) == main(["certs", "token"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first != second


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (
            ["run", "--certs", "{}/node-0", "--rendezvous", "10.0.0.1:1", "--job", "x", "-m", "a"],
            "is for worker 'node-0' of job 'lm', which may not join job 'x'",
        ),
        (["run", "--certs", "{}/node-0", "--insecure", "-m", "a"], "shardnet run: more than one is given of a folder of certificates"),
        (["rendezvous", "--certs", "{}/node-0"], "is for worker 'node-0' of job 'lm', which no worker accepts as a rendezvous"),
        (["status", "10.0.0.1:1", "--certs", "{}/nobody"], "shardnet status: cannot read {}/nobody/authority.pem"),
    ],
)
def test_certificates_of_no_use_are_told_before_anything_starts(
    cluster: Path, given: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word.format(cluster) for word in given]) == 2
    error = capsys.readouterr().err
    assert complaint.format(cluster) in error
    assert error.count("\n") == 1


def test_the_environment_is_as_good_as_options(cluster: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SHARDNET_CERTS", str(cluster / "node-0"))
    assert main(["rendezvous"]) == 2
    assert "is for worker 'node-0'" in capsys.readouterr().err
    monkeypatch.delenv("SHARDNET_CERTS")
    monkeypatch.setenv("SHARDNET_TOKEN", "secret")
    assert main(["rendezvous"]) == 2
    assert "was not made by `shardnet certs token`" in capsys.readouterr().err


def test_the_environment_may_allow_plaintext(monkeypatch: pytest.MonkeyPatch) -> None:
    options = Parser()
    Protection.add_to(options)
    for value, allowed in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("SHARDNET_INSECURE", value)
        assert Protection.of(options.parse_args([])) == Protection(insecure=allowed)
    assert Protection.of(options.parse_args(["--insecure"])) == Protection(insecure=True)


@pytest.mark.parametrize(
    ("value", "others", "complaint"),
    [
        ("yes", {}, "SHARDNET_INSECURE must be 0 or 1, got 'yes'"),
        ("1", {"SHARDNET_CERTS": "certs"}, "more than one is given of a folder of certificates"),
        ("1", {"SHARDNET_TOKEN": "secret"}, "more than one is given of a folder of certificates"),
    ],
)
def test_what_the_environment_says_of_plaintext_is_checked(
    value: str, others: dict[str, str], complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in ({"SHARDNET_INSECURE": value} | others).items():
        monkeypatch.setenv(name, text)
    assert main(["rendezvous"]) == 2
    assert complaint in capsys.readouterr().err


def test_a_token_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    token = new_token()
    assert token not in repr(Protection(token=token))


def test_workers_get_what_the_launcher_has(cluster: Path, tmp_path: Path) -> None:
    """They get nothing else: other inherited settings could give them another protection than the rendezvous has."""
    names = "('CERTS', 'TOKEN', 'INSECURE', 'JOB')"
    program = script(tmp_path, f"print([os.environ['SHARDNET_' + name] for name in {names}])")
    given = ("--rendezvous", "10.0.0.1:1", "--nnodes", "2", "--certs", str(cluster / "node-0"))
    assert shardnet(tmp_path, "run", *given, program).out == f"[local 0] {[str(cluster / 'node-0'), '', '0', 'lm']}\n"


def test_a_run_on_one_machine_needs_no_certificate_for_its_rendezvous(cluster: Path, tmp_path: Path) -> None:
    """A user who wants its connections encrypted gets that with a token made for this run."""
    text = """
import asyncio, torch, shardnet
async def main():
    async with shardnet.connect() as cluster:
        total = await cluster.backend.all_reduce(torch.ones(1))
        print(total.item(), bool(os.environ['SHARDNET_TOKEN']), cluster.topology.me.identity.startswith('shardnet:worker:*:'))
asyncio.run(main())
"""
    result = shardnet(tmp_path, "run", "--nproc", "2", "--certs", str(cluster / "node-0"), script(tmp_path, text))
    assert sorted(result.out.splitlines()) == ["[0] 2.0 True True", "[1] 2.0 True True"], result.err


def test_a_rendezvous_and_somebody_who_looks(cluster: Path, tmp_path: Path) -> None:
    with Launched(tmp_path, "rendezvous", "--listen", "127.0.0.1:0", "--certs", str(cluster / "rendezvous")) as rendezvous:
        first, _, third = rendezvous.read_lines(3)
        assert third.endswith(" --certs DIR")
        address = first.split()[3].rstrip(";")
        (tmp_path / "me").mkdir()
        looked = shardnet(tmp_path / "me", "status", address, "--certs", str(cluster / "me"))
        assert looked.out.startswith(f"rendezvous {address}: serving, mutual TLS, up ")
        refused = shardnet(tmp_path / "me", "status", address)
        assert refused.status == 1
        assert refused.err.startswith(f"shardnet status: {address} and this process do not trust each other: this port accepts only TLS")
