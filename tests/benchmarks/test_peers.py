"""The report of a contest with other projects. The contest itself needs their packages: benchmarks/peers."""

import os
import signal
import subprocess

from benchmarks.gauges import watched
from benchmarks.peers.__main__ import MORTAL, PAIRS
from benchmarks.peers.contest import Figures, Loss
from benchmarks.peers.tables import losses_table, steps_table
from benchmarks.render import as_markdown


def figures(name: str, *, step_s: float, loss: float) -> Figures:
    return Figures(name, [step_s, 1.1 * step_s, 3 * step_s], [5.5, loss], [1e8, 2e8, 3e8], 3_000_000_000)


def test_a_row_a_pair() -> None:
    pair = figures("ours", step_s=1.0, loss=5.0), figures("theirs", step_s=1.5, loss=5.0005)
    assert as_markdown(steps_table([pair])).splitlines()[-1] == (
        "| ours | 1100 | 1000-3000 | 200 | 3000 | theirs | 1650 | 1500-4500 | 200 | 3000 | 1.50x | equal |"
    )


def test_losses_that_are_not_equal_are_told() -> None:
    pair = figures("ours", step_s=1.0, loss=5.0), figures("theirs", step_s=1.0, loss=5.25)
    assert steps_table([pair]).rows[0][-1] == "differ by 0.25"


def test_a_row_an_engine_that_outlives_a_kill() -> None:
    table = losses_table({"ours": [Loss(1.0, 2.5, 0, 1), Loss(1.2, 3.5, 1, 0)]})
    assert as_markdown(table).splitlines()[-1] == "| ours | 2 | 1100 | 3.00 | 2.50-3.50 | 1 | 1 |"


def test_all_contestants_have_names_of_their_own() -> None:
    engines = {engine for pair in PAIRS for engine in pair} | {*MORTAL}
    assert len({(engine.peer, engine.name) for engine in engines}) == len(engines)


def test_memory_is_read_of_processes_that_may_end() -> None:
    with subprocess.Popen(["sleep", "60"]) as process, watched(lambda: [os.getpid(), process.pid]) as peak:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert peak[0] > 1_000_000
