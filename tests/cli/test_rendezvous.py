"""`shardnet rendezvous` and `shardnet status` in processes of their own."""

import asyncio
import json
import resource
import signal
import urllib.request
from pathlib import Path
from urllib.error import URLError

import pytest

from shardnet.config import Timeouts
from shardnet.rendezvous.client import join
from shardnet.rendezvous.identity import new_incarnation
from shardnet.rendezvous.request import JoinRequest
from tests.cli.launched import Launched, shardnet


def test_it_tells_its_address_answers_and_ends_cleanly_on_ctrl_c(tmp_path: Path) -> None:
    with Launched(tmp_path, "rendezvous", "--listen", "127.0.0.1:0") as rendezvous:
        first = rendezvous.read_lines(3)[0]
        address = first.split()[3].rstrip(";")
        asking = tmp_path / "asking"
        asking.mkdir()
        status = shardnet(asking, "status", address)
        as_json = shardnet(asking, "status", "--json", address)
        rendezvous.process.send_signal(signal.SIGINT)
        result = rendezvous.finish()
    assert status.status == 0
    assert status.out.startswith(f"rendezvous {address}: serving, plaintext, up 0:0")
    assert status.out.endswith("\nno jobs\n")
    assert json.loads(as_json.out)["stats"]["role"] == "rendezvous"
    assert (result.status, result.err) == (0, "")
    assert result.out.endswith("rendezvous: closed\n")


def test_it_may_open_as_many_files_as_its_user_may(tmp_path: Path) -> None:
    """It needs three for each worker, and systems give a process 1024 unless it asks for more."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        with Launched(tmp_path, "rendezvous", "--listen", "127.0.0.1:0") as rendezvous:
            rendezvous.read_lines(1)
            limits = Path(f"/proc/{rendezvous.process.pid}/limits").read_text()
            rendezvous.process.send_signal(signal.SIGINT)
            rendezvous.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    (line,) = (line for line in limits.splitlines() if line.startswith("Max open files"))
    assert int(line.split()[3]) == (65536 if before[1] == resource.RLIM_INFINITY else min(before[1], 65536))


def test_it_ends_with_the_training_where_it_is_told_to(tmp_path: Path) -> None:
    with Launched(tmp_path, "rendezvous", "--listen", "127.0.0.1:0", "--until-done") as rendezvous:
        address = rendezvous.read_lines(1)[0].split()[3].rstrip(";")
        lease = asyncio.run(join_and_leave(address))
        result = rendezvous.finish()
    assert lease == 1
    assert (result.status, result.err.count("vanished")) == (0, 0)
    assert result.err.splitlines() == [
        "shardnet: job default: 127.0.0.1:1 joined from node node",
        "shardnet: job default: epoch 1 has begun, with 1 worker on 1 node",
        "shardnet: job default: 127.0.0.1:1 left",
        "shardnet: job default: finished, in epoch 1",
    ]
    assert result.out.endswith("rendezvous: closed\n")


async def join_and_leave(address: str) -> int:
    """Join as the only worker of a job, and leave; return the size of its world."""
    request = JoinRequest("default", new_incarnation(), "127.0.0.1:1", "node", min_world_size=1, max_world_size=1)
    async with join(address, request, timeouts=Timeouts.for_tests()) as membership:
        return membership.topology.world_size


def test_it_serves_metrics_where_it_is_told_to(tmp_path: Path) -> None:
    with Launched(tmp_path, "rendezvous", "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0", "--reflection") as rendezvous:
        *_, last = rendezvous.read_lines(4)
        assert last.startswith("rendezvous: metrics at http://127.0.0.1:")
        with urllib.request.urlopen(last.split()[-1], timeout=10) as page:
            assert "\nshardnet_up 1.0\n" in page.read().decode()
        rendezvous.process.send_signal(signal.SIGINT)
        assert rendezvous.finish().status == 0


def test_metrics_for_other_machines_are_refused_in_one_line(tmp_path: Path) -> None:
    result = shardnet(tmp_path, "rendezvous", "--listen", "127.0.0.1:0", "--metrics", "0.0.0.0:0")
    assert (result.status, result.err.count("\n")) == (2, 1)
    assert result.err.startswith("shardnet rendezvous: metrics at 0.0.0.0:0 would be open to everybody")


def test_the_page_is_where_it_is_told_to_be_and_its_port_is_free_afterwards(tmp_path: Path) -> None:
    with Launched(tmp_path, "rendezvous", "--listen", "127.0.0.1:0", "--web", "127.0.0.1:0") as rendezvous:
        *_, last = rendezvous.read_lines(4)
        assert last.startswith("rendezvous: page at http://127.0.0.1:")
        url = last.split()[-1]
        with urllib.request.urlopen(url, timeout=10) as page:
            assert "<title>shardnet</title>" in page.read().decode()
        other = tmp_path / "other"
        other.mkdir()
        taken = shardnet(other, "rendezvous", "--listen", "127.0.0.1:0", "--web", url.removeprefix("http://").rstrip("/"))
        assert (taken.status, taken.err.count("\n")) == (1, 1)
        assert "another process already listens there; end it, give each process a port of its own" in taken.err
        rendezvous.process.send_signal(signal.SIGINT)
        result = rendezvous.finish()
    assert (result.status, result.err) == (0, "")
    with pytest.raises(URLError):
        urllib.request.urlopen(url, timeout=10)


def test_a_page_for_other_machines_is_refused_in_one_line(tmp_path: Path) -> None:
    result = shardnet(tmp_path, "rendezvous", "--listen", "127.0.0.1:0", "--web", "0.0.0.0:0")
    assert (result.status, result.err.count("\n")) == (2, 1)
    assert result.err.startswith("shardnet rendezvous: the page at 0.0.0.0:0 would be open to everybody")


def test_a_port_that_is_taken_is_one_line_and_status_1(tmp_path: Path) -> None:
    with Launched(tmp_path, "rendezvous", "--listen", "127.0.0.1:0") as first:
        address = first.read_lines(1)[0].split()[3].rstrip(";")
        second = tmp_path / "second"
        second.mkdir()
        result = shardnet(second, "rendezvous", "--listen", address)
    assert result.status == 1
    assert result.err.startswith(f"shardnet rendezvous: cannot listen on {address}: another process already listens there")
    assert result.err.count("\n") == 1


def test_status_of_nobody_is_one_line_and_status_1(tmp_path: Path) -> None:
    result = shardnet(tmp_path, "status", "127.0.0.1:1")
    assert (result.status, result.out, result.err.count("\n")) == (1, "", 1)
    assert result.err == "shardnet status: 127.0.0.1:1 is not available: Connection refused; check the address and that the process runs\n"
