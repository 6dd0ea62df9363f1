"""`shardnet run` for programs that go on when a worker has died."""

import os
import signal
from pathlib import Path

from tests.cli.launched import Launched, script, shardnet

MEMORY = " (the system does this when memory runs out)"


def test_who_dies_is_replaced_by_a_new_worker_of_the_same_place(tmp_path: Path) -> None:
    text = """
print(*(os.environ.get(f'SHARDNET_{n}', 0) for n in ('WORLD_SIZE', 'MIN_WORLD_SIZE', 'ELASTIC', 'REPLACEMENT')))
if rank == 1 and not os.path.exists('died'):
    os.close(os.open('died', os.O_CREAT))
    os.kill(os.getpid(), signal.SIGKILL)
os.close(os.open('fifo', os.O_WRONLY if rank == 1 else os.O_RDONLY))  # each waits for the other
"""
    os.mkfifo(tmp_path / "fifo")
    result = shardnet(tmp_path, "run", "--nproc", "2", "--restarts", "3", script(tmp_path, text))
    assert result.status == 0
    assert sorted(result.out.splitlines()) == ["[0] 2 2 1 0", "[1] 2 2 1 0", "[local 1] 2 2 1 1"]
    assert result.err.splitlines() == [
        f"shardnet: rank 1 failed: killed by SIGKILL{MEMORY}; restarting it (1 of 3)",
        "shardnet: 1 worker was lost on the way: rank 1 (killed by SIGKILL, replaced)",
    ]


def test_the_others_go_on(tmp_path: Path) -> None:
    text = """
if rank > 0:
    raise ValueError(f'boom {rank}')
os.read(os.open('fifo', os.O_RDONLY), 1)
"""
    os.mkfifo(tmp_path / "fifo")
    with Launched(tmp_path, "run", "--nproc", "3", "--min-workers", "1", script(tmp_path, text), merged=True) as run:
        for rank in (1, 2):
            said = f"shardnet: rank {rank} failed: exit code 1; the others go on. Its last line on stderr:\n    ValueError: boom {rank}\n"
            run.read_until(said)
        (tmp_path / "fifo").write_text("go on")
        result = run.finish()
    assert result.status == 0
    last = result.out.splitlines()[-1]
    assert last.startswith("shardnet: 2 workers were lost on the way: rank ")
    assert last.count("(exit code 1)") == 2


def test_too_few_are_ended(tmp_path: Path) -> None:
    result = shardnet(tmp_path, "run", "--nproc", "2", "--restarts", "0", script(tmp_path, "sys.exit(3) if rank else signal.pause()"))
    assert result.status == 3
    assert result.err == (
        "shardnet: rank 1 failed: exit code 3; 1 other ended with it; fewer than 2 workers cannot go on. It wrote nothing to stderr.\n"
    )


def test_the_only_worker_of_a_machine_is_not_replaced_and_its_failure_is_the_end_here(tmp_path: Path) -> None:
    options = ("--nnodes", "2", "--rendezvous", "127.0.0.1:1", "--min-workers", "1")
    result = shardnet(tmp_path, "run", *options, script(tmp_path, "sys.exit(7)"))
    assert result.status == 7
    assert result.err == "shardnet: local rank 0 failed: exit code 7. It wrote nothing to stderr.\n"


def test_a_program_that_fails_at_once_is_started_more_and_more_slowly(tmp_path: Path) -> None:
    result = shardnet(tmp_path, "run", "--restarts", "2", script(tmp_path, "sys.exit(f'no data at {rank}')"))
    assert result.status == 1
    assert [line for line in result.err.splitlines() if line.startswith("shardnet: ")] == [
        "shardnet: rank 0 failed: exit code 1; restarting it (1 of 2). Its last line on stderr:",
        "shardnet: local rank 0 failed: exit code 1; restarting it in 0.5 s (2 of 2). Its last line on stderr:",
        "shardnet: local rank 0 failed: exit code 1. The end of its stderr stands above.",
    ]
    assert result.err.count("] no data at 0\n") == 3


def test_a_training_is_not_done_again_because_its_last_checkpoint_has_failed(tmp_path: Path) -> None:
    text = """
import shardnet
from shardnet import elastic
from torch import nn

async def train(cluster, state):
    await state.resume(await cluster.shard(nn.Linear(3, 1)))
    print('begins behind step', state.step)
    await state.commit(1)

shardnet.run(lambda: elastic.run(train, checkpoints='worker.py/no-folder', save_every=1))
"""
    result = shardnet(tmp_path, "run", "--restarts", "1", script(tmp_path, text))
    assert result.status == 1
    assert result.out.count("begins behind step 0") == 1
    assert "restarting" not in result.err
    assert "EndNotSaved: the training is over, at step 1, but the checkpoint of step 1 cannot be written: rank 0: " in result.err


def test_who_stops_by_the_users_wish_is_not_replaced(tmp_path: Path) -> None:
    text = """
signal.signal(signal.SIGINT, lambda *_: sys.exit(1))
print('ready')
while True:
    signal.sigtimedwait([], 0.1)
"""
    with Launched(tmp_path, "run", "--nproc", "2", "--restarts", "9", "--min-workers", "1", script(tmp_path, text)) as run:
        run.read_until("[0] ready", "[1] ready")
        run.process.send_signal(signal.SIGINT)
        result = run.finish()
    assert result.status == 130
    assert result.out.count("ready") == 2
    assert result.err == "shardnet: SIGINT: passed on to the workers; a second one kills them\n"


def test_more_workers_than_there_are_cannot_be_asked_for(tmp_path: Path) -> None:
    result = shardnet(tmp_path, "run", "--nproc", "2", "--min-workers", "3", script(tmp_path, ""))
    assert result.status == 2
    assert "give --min-workers a number from 1 to 2" in result.err
