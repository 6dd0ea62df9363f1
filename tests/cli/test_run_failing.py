"""`shardnet run` when a worker fails: all end, and the worker to blame is named last."""

import os
import re
from pathlib import Path

import pytest

from tests.cli.launched import Launched, has_ended, script, shardnet


def test_one_failing_worker_ends_all_and_is_named_last(tmp_path: Path) -> None:
    """The other workers print nothing, because the launcher may read their earlier output after the failure."""
    text = """
open(f'pid{rank}', 'w').write(str(os.getpid()))
if rank == 1:
    gate, others = os.open('fifo', os.O_RDWR), 0
    while others < 2:
        others += len(os.read(gate, 2))
    print('so long', file=sys.stderr)
    raise ValueError('boom')
os.write(os.open('fifo', os.O_WRONLY), b'.')
signal.pause()
"""
    os.mkfifo(tmp_path / "fifo")
    result = shardnet(tmp_path, "run", "--nproc", "3", script(tmp_path, text))
    assert result.status == 1
    assert result.err.splitlines()[-2:] == [
        "[1] ValueError: boom",
        "shardnet: rank 1 failed: exit code 1; 2 others ended with it. The end of its stderr stands above.",
    ]
    assert all(has_ended(int((tmp_path / f"pid{rank}").read_text())) for rank in range(3))


def test_its_error_is_shown_again_where_others_have_said_something_since(tmp_path: Path) -> None:
    text = """
if rank == 1:
    os.write(os.open('fifo', os.O_WRONLY), b'.')
    raise ValueError('boom')
signal.signal(signal.SIGTERM, lambda *_: (print('goodbye'), sys.exit(0)))
os.read(os.open('fifo', os.O_RDONLY), 1)
signal.pause()
"""
    os.mkfifo(tmp_path / "fifo")
    with Launched(tmp_path, "run", "--nproc", "2", script(tmp_path, text), merged=True) as command:
        lines = command.finish().out.splitlines()
    head = lines.index("shardnet: rank 1 failed: exit code 1; 1 other ended with it. The end of its stderr:")
    said, goodbye = lines.index("[1] ValueError: boom"), lines.index("[0] goodbye")
    assert said < goodbye < head
    assert lines[head + 1 :] == [f"    {line.removeprefix('[1] ')}" for line in lines[: said + 1]]


def test_an_error_of_all_workers_is_told_once(tmp_path: Path) -> None:
    """Usually it is a mistake in the program. The workers write it at the same time, line by line."""
    text = """
from shardnet.errors import UsageError
def mistake():
    raise UsageError(f'[rank {rank}/3 epoch 1 step 0] no unit is a Block')
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print('ready', flush=True)
os.open('fifo', os.O_RDONLY)
mistake()
"""
    os.mkfifo(tmp_path / "fifo")
    with Launched(tmp_path, "run", "--nproc", "3", "--grace", "30", script(tmp_path, text)) as command:
        command.read_until(*(f"[{rank}] ready\n" for rank in range(3)))
        with (tmp_path / "fifo").open("wb"):
            lines = command.finish().err.splitlines()
    end = next(number for number, line in enumerate(lines) if line.startswith("shardnet: "))
    first, whole, short = lines[0][1], lines[: end - 2], lines[end - 2 : end]
    assert all(line.startswith(f"[{first}] ") for line in whole)
    assert [f"[{first}] Traceback (most recent call last):", f"[{first}]     mistake()"] == [whole[0], whole[2]]
    assert sorted(short) == [
        f"[{rank}] shardnet.errors.UsageError: [rank {rank}/3 epoch 1 step 0] no unit is a Block (with the traceback of rank {first})"
        for rank in sorted({"0", "1", "2"} - {first})
    ]
    assert re.fullmatch(
        r"shardnet: rank \d failed: exit code 1(; \d others? ended with it)?\. The end of its stderr stands above\.", lines[end]
    )
    assert len(lines) == end + 1


def test_a_variable_that_makes_no_sense_is_told_in_one_line_before_anybody_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDNET_ROUTING", "rinng")
    result = shardnet(tmp_path, "run", "--nproc", "2", "--restarts", "1", script(tmp_path, "print('started')"))
    complaint = "shardnet run: SHARDNET_ROUTING must be one of auto, ring, direct, rank-order, got 'rinng'\n"
    assert (result.status, result.out, result.err) == (2, "", complaint)


@pytest.mark.parametrize(("name", "value"), [("SHARDNET_LISTEN", "127.0.0.1:7001"), ("SHARDNET_ADVERTISE", "10.0.0.1:7001")])
def test_workers_of_one_machine_cannot_share_a_port(name: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told before anybody is started; a host alone is fine, and a port is for one worker."""
    program = script(tmp_path, "print('started')")
    monkeypatch.setenv(name, value)
    result = shardnet(tmp_path, "run", "--nproc", "2", program)
    complaint = "shardnet run: SHARDNET_LISTEN or SHARDNET_ADVERTISE fixes one port for 2 workers of this machine; set only a host"
    assert (result.status, result.out) == (2, "")
    assert result.err.startswith(complaint)
    assert shardnet(tmp_path, "run", program).out == "[0] started\n"
    if name == "SHARDNET_LISTEN":
        monkeypatch.setenv(name, "127.0.0.1")
        assert shardnet(tmp_path, "run", "--nproc", "2", program).status == 0


def test_workers_that_would_listen_to_other_machines_without_protection_are_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = script(tmp_path, "print('started')")
    monkeypatch.setenv("SHARDNET_LISTEN", "0.0.0.0")
    result = shardnet(tmp_path, "run", "--nproc", "2", program)
    assert (result.status, result.out) == (2, "")
    assert re.fullmatch(r"shardnet run: .*0\.0\.0\.0.*--insecure.*\n", result.err)
    monkeypatch.setenv("SHARDNET_INSECURE", "1")
    assert shardnet(tmp_path, "run", program).out == "[0] started\n"


def test_what_the_launcher_says_itself_may_be_anything_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDNET_WORLD_SIZE", "many")
    result = shardnet(tmp_path, "run", "--nproc", "2", script(tmp_path, "print(os.environ['SHARDNET_WORLD_SIZE'])"))
    assert (result.status, sorted(result.out.splitlines()), result.err) == (0, ["[0] 2", "[1] 2"], "")


def test_the_exit_status_is_the_workers_own(tmp_path: Path) -> None:
    result = shardnet(tmp_path, "run", "--nproc", "2", script(tmp_path, "sys.exit(7) if rank == 0 else signal.pause()"))
    assert result.status == 7
    assert result.err == "shardnet: rank 0 failed: exit code 7; 1 other ended with it. It wrote nothing to stderr.\n"


def test_a_worker_that_a_signal_killed_is_reported_by_name(tmp_path: Path) -> None:
    result = shardnet(tmp_path, "run", "--nproc", "2", script(tmp_path, "os.kill(os.getpid(), 11) if rank == 1 else signal.pause()"))
    assert result.status == 128 + 11
    assert "rank 1 failed: killed by SIGSEGV" in result.err


def test_who_lost_a_peer_is_not_blamed_for_it(tmp_path: Path) -> None:
    """Rank 1 notices rank 0's failure and ends first; rank 0 prints its error a while later, and the launcher waits for that."""
    text = """
if rank == 1:
    from shardnet.errors import PeerLost
    gate = os.open('fifo', os.O_WRONLY)
    raise PeerLost('rank 0 (127.0.0.1:1) closed its connection; call reform()', 0)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
os.read(os.open('fifo', os.O_RDONLY), 1)  # rank 1 has ended
if signal.sigtimedwait({signal.SIGTERM}, 0.7):
    sys.exit('hurried')
raise ValueError('the reason')
"""
    os.mkfifo(tmp_path / "fifo")
    result = shardnet(tmp_path, "run", "--nproc", "2", script(tmp_path, text))
    assert "PeerLost" in result.err
    assert "shardnet: rank 0 failed" in result.err
    assert "[0] ValueError: the reason\n" in result.err


def test_who_lost_a_peer_elsewhere_ends_the_others_here(tmp_path: Path) -> None:
    text = """
if rank == 1:
    from shardnet.errors import PeerLost
    raise PeerLost('rank 5 (10.0.0.2:7001) closed its connection; call reform()', 5)
signal.pause()
"""
    result = shardnet(tmp_path, "run", "--nproc", "2", "--grace", "0.3", script(tmp_path, text))
    assert result.status == 1
    assert "shardnet: rank 1 failed: exit code 1; 1 other ended with it." in result.err


def test_a_worker_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    text = """
if rank == 0:
    signal.signal(signal.SIGTERM, lambda *_: print('not yet'))
    print('pid', os.getpid())
    os.close(os.open('fifo', os.O_WRONLY))
    while True:
        signal.sigtimedwait([], 0.1)
os.read(os.open('fifo', os.O_RDONLY), 1)
sys.exit(4)
"""
    os.mkfifo(tmp_path / "fifo")
    result = shardnet(tmp_path, "run", "--nproc", "2", "--grace", "0.3", script(tmp_path, text))
    assert result.status == 4
    assert "[0] not yet" in result.out
    assert has_ended(int(result.out.split()[2]))


def test_a_script_with_a_syntax_error_is_told(tmp_path: Path) -> None:
    result = shardnet(tmp_path, "run", script(tmp_path, "def"))
    assert result.status == 1
    assert "[0] SyntaxError: invalid syntax\nshardnet: rank 0 failed: exit code 1. " in result.err


def test_a_program_of_torch_tells_the_others_why_it_ends(tmp_path: Path) -> None:
    """It need not catch its error: the last thing that a process group does is to say it."""
    text = """
import signal
import torch
import torch.distributed as dist
dist.init_process_group("shardnet", init_method="shardnet://")
dist.barrier()
if rank == 1:
    raise ValueError("bad sample 17")
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # with which the launcher may be faster
dist.all_reduce(torch.ones(3))
"""
    result = shardnet(tmp_path, "run", "--nproc", "2", script(tmp_path, text))
    assert result.status == 1
    assert re.search(
        r"^\[0\] .*PeerLost: .* rank 1 \(\S+\) lost during all_reduce #\d+: its program raised ValueError: bad sample 17$", result.err, re.M
    )
    assert "[1] ValueError: bad sample 17" in result.err.splitlines()
    assert "shardnet: rank 1 failed: exit code 1" in result.err
