"""What `shardnet doctor` finds, on this machine and between doctors."""

import asyncio
import json
import platform
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from shardnet.cli.main import main
from shardnet.collectives.route import Routing
from shardnet.config import Timeouts
from shardnet.credentials import Identity, Role, Security
from shardnet.credentials.token import new_token
from shardnet.doctor import Finding, Level, about_machine, about_peers, about_rendezvous, about_trust
from shardnet.doctor.links import Link, judge, opponents
from shardnet.loop import LoopThread
from shardnet.rendezvous.server import RendezvousServer
from shardnet.testing import Relay
from shardnet.training import connect
from tests.training.workers import rendezvous

FAST = Link(round_trip_s=0.0002, clock_s=0.003, to_bytes_per_s=2e9, from_bytes_per_s=1e8)


def one(found: list[Finding], topic: str) -> Finding:
    (finding,) = (each for each in found if each.topic == topic)
    return finding


async def test_a_machine_that_is_well() -> None:
    found = await about_machine("127.0.0.1")
    assert {each.level for each in found if each.topic not in ("files", "shared memory")} == {Level.OK}
    assert f"Python {platform.python_version()}" in one(found, "versions").what
    assert one(found, "listening").what == "workers can listen on 127.0.0.1"


async def test_a_misspelt_variable_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDNET_ROUTNG", "ring")
    found = one(await about_machine("127.0.0.1"), "settings")
    assert (found.level, found.what) == (Level.WARNING, "nothing reads SHARDNET_ROUTNG in the environment")
    assert found.advice == "did you mean SHARDNET_ROUTING?"


async def test_a_machine_that_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDNET_ELASTIC", "yes")
    with few_files():
        found = await about_machine("192.0.2.1")
    assert one(found, "files").level is Level.WARNING
    assert "a world of more than 128 workers needs a higher limit" in one(found, "files").advice
    assert one(found, "settings").what == "SHARDNET_ELASTIC must be 0 or 1, got 'yes'"
    assert one(found, "listening").level is Level.PROBLEM
    assert "this machine does not have the address" in one(found, "listening").what


async def test_a_process_that_may_have_any_number_of_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    found = one(await about_machine("127.0.0.1"), "files")
    assert (found.level, found.what) == (Level.OK, "a process may have any number open at once")


@contextmanager
def few_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_trust(tmp_path: Path) -> None:
    assert main(["certs", "init", str(tmp_path)]) == 0
    assert main(["certs", "issue", str(tmp_path), "new"]) == 0
    assert main(["certs", "issue", str(tmp_path), "old", "--days", "3"]) == 0
    certificate, key = about_trust(insecure=False, certs=str(tmp_path / "new"), token="")
    assert (certificate.level, key.level) == (Level.OK, Level.OK)
    assert "a certificate for worker 'new' of job 'default', until " in certificate.what
    (tmp_path / "old/key.pem").chmod(0o644)
    certificate, key = about_trust(insecure=False, certs=str(tmp_path / "old"), token="")
    assert (certificate.level, certificate.advice) == (Level.WARNING, "it expires soon: make a new one with `shardnet certs issue`")
    assert key.what == f"{tmp_path}/old/key.pem can be read by others (mode 644)"
    assert key.advice.endswith(f"chmod 600 {tmp_path}/old/key.pem")
    (missing,) = about_trust(insecure=False, certs=str(tmp_path / "none"), token="")
    assert missing.level is Level.PROBLEM
    (plain,) = about_trust(insecure=True, certs="", token="")
    assert plain.level is Level.WARNING
    (token,) = about_trust(insecure=False, certs="", token=new_token())
    assert token.level is Level.OK


def test_a_certificate_for_another_job_than_the_one_that_will_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`shardnet run` refuses it: a doctor that finds nothing would be wrong."""
    assert main(["certs", "init", str(tmp_path)]) == 0
    assert main(["certs", "issue", str(tmp_path), "node", "--job", "lm"]) == 0
    certs = str(tmp_path / "node")
    assert [each.level for each in about_trust(insecure=False, certs=certs, token="", job="lm")] == [Level.OK, Level.OK]
    *_, other = about_trust(insecure=False, certs=certs, token="", job="other")
    assert (other.level, other.what) == (Level.PROBLEM, "this certificate lets no worker join job 'other'")
    assert "`shardnet certs issue --job`" in other.advice
    assert main(["doctor", "--certs", certs, "--job", "other"]) == 1
    assert "this certificate lets no worker join job 'other'" in capsys.readouterr().out


def test_a_certificate_lets_the_doctor_in_beside_its_job() -> None:
    worker = Identity(Role.WORKER, "node", "lm")
    assert worker.may_join("lm.doctor")
    assert not worker.may_join("other.doctor")
    assert not worker.may_join("lm.doctor.doctor")
    assert not Identity(Role.OPERATOR, "me").may_join("lm.doctor")


async def test_a_rendezvous_that_is_there() -> None:
    with rendezvous() as address:
        found = await about_rendezvous(address, Security(), 5.0)
    assert [each.level for each in found] == [Level.OK, Level.OK]
    assert "127.0.0.1 is 127.0.0.1; connected in " in found[0].what
    assert f"{address} is serving, shardnet " in found[1].what


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("127.0.0.1:1", ("127.0.0.1:1 cannot be reached: Connection refused", "no process listens there: start `shardnet rendezvous")),
        ("10.0.0.1:7000", ("10.0.0.1:7000 is not a loopback address", "")),
    ],
)
async def test_a_rendezvous_that_cannot_be_reached(address: str, words: tuple[str, str]) -> None:
    (finding,) = await about_rendezvous(address, Security(), 1.0)
    assert finding.level is Level.PROBLEM
    assert finding.what.startswith(words[0])
    assert finding.advice.startswith(words[1])


async def test_somebody_else_at_its_address() -> None:
    with rendezvous() as address:
        async with connect(rendezvous=address, timeouts=Timeouts.for_tests()) as cluster:
            worker = cluster.topology.me.address
            *_, finding = await about_rendezvous(worker, Security(), 5.0)
    assert (finding.level, finding.what) == (Level.PROBLEM, f"{worker} is a worker")


async def test_a_rendezvous_of_others() -> None:
    server = RendezvousServer("127.0.0.1:0", timeouts=Timeouts.for_tests(), security=Security.find(Role.RENDEZVOUS, token=new_token()))
    await LoopThread.shared().run_here(server.start())
    try:
        for security in (Security(), Security.find(Role.WORKER, token=new_token())):
            reached, finding = await about_rendezvous(server.address, security, 3.0)
            assert (reached.level, finding.level) == (Level.OK, Level.PROBLEM)
    finally:
        await LoopThread.shared().run_here(server.aclose())


@pytest.mark.parametrize("world_size", range(2, 10))
def test_everybody_meets_everybody_once_and_nobody_is_in_two_places(world_size: int) -> None:
    rounds = list(zip(*(list(opponents(rank, world_size)) for rank in range(world_size)), strict=True))
    assert len(rounds) == world_size - 1 + world_size % 2
    for each in rounds:
        assert all(other is None or (other != rank and each[other] == rank) for rank, other in enumerate(each))
    for rank in range(world_size):
        assert sorted(each[rank] for each in rounds if each[rank] is not None) == [other for other in range(world_size) if other != rank]


async def test_doctors_measure_each_other() -> None:
    with rendezvous() as address:
        own = [{"node": node} for node in ("here", "here", "there")]
        found = await asyncio.gather(*(about_peers(3, job="lm", wait_s=20.0, rendezvous=address, **each) for each in own))
    for each in found:
        assert [finding.topic for finding in each] == ["peers", "peers"]
        assert not any(finding.level is Level.PROBLEM for finding in each)
    (ways,) = {
        tuple(sorted(": memory, " in finding.what for finding in each)) for each in found if any(": memory, " in f.what for f in each)
    }
    assert ways == (False, True), "two of them are on one machine"


async def test_doctors_leave_alone_what_the_training_beside_them_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, rendezvous() as address:
        monkeypatch.setenv("SHARDNET_METRICS", f"127.0.0.1:{taken.getsockname()[1]}")
        for name in ("TRACK", "FLIGHT", "TRACE"):
            monkeypatch.setenv(f"SHARDNET_{name}", str(tmp_path / name))
        found = await asyncio.gather(*(about_peers(2, job="lm", wait_s=20.0, rendezvous=address) for _ in range(2)))
    assert not any(finding.level is Level.PROBLEM for each in found for finding in each), found
    assert not await asyncio.to_thread(lambda: list(tmp_path.iterdir()))


async def test_doctors_that_do_not_come() -> None:
    with rendezvous() as address:
        (finding,) = await about_peers(2, job="lm", wait_s=2.0, rendezvous=address)
    assert finding.level is Level.PROBLEM
    assert finding.what.endswith(" s")
    assert "only 1 of 2 workers joined" in finding.what
    assert finding.advice.startswith("run shardnet doctor on all machines at the same time")


async def test_doctors_that_expect_different_numbers() -> None:
    with rendezvous() as address:
        found = await asyncio.gather(*(about_peers(workers, job="lm", wait_s=2.0, rendezvous=address) for workers in (2, 3)))
    assert sorted(finding.advice.split(",")[0] for (finding,) in found) == [
        "give --rendezvous",
        "run shardnet doctor on all machines at the same time",
    ]


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Doctors that give up on a port soon."""
    monkeypatch.setattr("shardnet.doctor.ports.DIAL_S", 0.5)
    monkeypatch.setattr("shardnet.doctor.gathering.STAY_S", 1.0)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(("harm", "words"), [("cut", "Connection reset by peer"), ("hold", "nothing answers within 0.5 s")])
async def test_a_port_that_others_do_not_reach_is_named_by_all(harm: str, words: str) -> None:
    """The one behind it reaches the others, and learns only from them that its port is closed."""
    with rendezvous() as address:
        async with Relay("127.0.0.1:0") as relay:
            getattr(relay, harm)()
            own = [{"node": "a"}, {"node": "b"}, {"node": "closed", "advertise": relay.address}]
            found = await asyncio.gather(*(about_peers(3, job="lm", wait_s=20.0, rendezvous=address, **each) for each in own))
    for one_end, other in ((found[0], "b"), (found[1], "a")):
        fine, closed = sorted(one_end[:2], key=lambda finding: finding.level is Level.PROBLEM)
        assert fine.level is Level.OK
        assert f", {other}) can be reached, answers in " in fine.what
        assert closed.what.endswith(f"({relay.address}, closed) cannot be reached from this machine: {words}")
        assert closed.advice.startswith("a loopback address can be reached only on its own machine: ")
    from_a, from_b, *told = found[2]
    assert (from_a.level, from_b.level) == (Level.OK, Level.OK)
    assert told
    for each in told:
        assert each.what.endswith(f"): it cannot reach this machine ({relay.address})")
        assert each.advice.startswith("connections from there must be let in here")


@pytest.mark.usefixtures("hasty")
async def test_ports_that_answer_where_no_mesh_can_be_formed() -> None:
    with rendezvous() as address:
        own = [{"routing": Routing.RING}, {"routing": Routing.DIRECT}]
        found = await asyncio.gather(*(about_peers(2, job="lm", wait_s=20.0, rendezvous=address, **each) for each in own))
    for reached, failed in found:
        assert reached.level is Level.OK
        assert "(127.0.0.1:" in reached.what
        assert failed.level is Level.PROBLEM
        assert "the mesh could not be formed" in failed.what
        assert failed.advice.startswith("this doctor has reached the ports of all others")
    assert any("routing" in failed.what for _, failed in found)


@pytest.mark.parametrize(
    ("link", "near", "shares_memory", "words"),
    [
        (FAST, True, True, ""),
        (FAST, False, False, ""),
        (FAST, True, False, "two processes of one machine do not share memory"),
        (replace(FAST, clock_s=-2.5), False, False, "set both clocks by NTP"),
        (replace(FAST, from_bytes_per_s=1e6), False, False, "less than 100 Mbit/s"),
    ],
)
def test_what_is_said_of_a_link(link: Link, near: bool, shares_memory: bool, words: str) -> None:
    finding = judge("rank 1 (10.0.0.2:7001, b)", link, near=near, shares_memory=shares_memory)
    assert finding.level is (Level.WARNING if words else Level.OK)
    assert finding.advice.startswith(words)
    assert finding.what.startswith(
        f"rank 1 (10.0.0.2:7001, b): {'memory' if shares_memory else 'gRPC'}, round trip 0.20 ms, 2.00 GB/s there"
    )


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with rendezvous() as address:
        assert main(["doctor", "--rendezvous", address]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[-1].startswith(f"ok       rendezvous     {address} is serving")
        assert main(["doctor", "--rendezvous", address, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert [each["topic"] for each in found[-2:]] == ["rendezvous", "rendezvous"]
        assert found[-1]["level"] == "ok"
    assert main(["doctor", "--rendezvous", "127.0.0.1:1"]) == 1
    assert "problem  rendezvous     127.0.0.1:1 cannot be reached: Connection refused\n" in capsys.readouterr().out
    for arguments in (["--workers", "2"], ["--workers", "1", "--rendezvous", "127.0.0.1:1"]):
        assert main(["doctor", *arguments]) == 2
        assert "needs at least two machines, and --rendezvous HOST:PORT" in capsys.readouterr().err


async def test_the_command_meets_in_the_job_of_its_certificate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certs", "init", str(tmp_path)]) == 0
    assert main(["certs", "issue", str(tmp_path), "left", "--job", "lm"]) == 0
    security = Security.find(Role.RENDEZVOUS, certs=str(tmp_path / "rendezvous"))
    server = RendezvousServer("127.0.0.1:0", timeouts=Timeouts.for_tests(), security=security)
    await LoopThread.shared().run_here(server.start())
    try:
        command = ["doctor", "--rendezvous", server.address, "--certs", str(tmp_path / "left"), "--workers", "2", "--wait", "0.3"]
        assert await asyncio.to_thread(main, command) == 1
        assert "only 1 of 2 workers joined" in " ".join(capsys.readouterr().out.split())
    finally:
        await LoopThread.shared().run_here(server.aclose())
