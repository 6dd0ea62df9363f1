"""What `make compose-test` reads from the logs of nodes."""

import subprocess

import pytest

from compose_test.story import Line, Story, epoch_of, read_line, step_of, world_of

STAMP = "2026-11-23T01:15:42.891179237Z"
AT_S = 1795396542.891179


def line(text: str) -> Line:
    found = read_line("node", f"{STAMP} {text}\n")
    assert found is not None
    return found


def test_a_line_has_the_engines_time() -> None:
    assert line("[0] hello").at_s == pytest.approx(AT_S)
    assert line("[0] hello").text == "[0] hello"
    assert read_line("node", "Error response from daemon: no such container\n") is None


def test_a_step_is_one_that_is_committed() -> None:
    assert step_of(line("[0] step 27 of 40: validation loss 5.523, training loss 5.545, 1,076 tokens/s, 1 s")) == 27
    assert step_of(line("shardnet: step 27/40, loss 3.527, 1.4k tokens/s, comm wait 58%, eta 0:05")) is None


def test_a_world_has_a_size() -> None:
    assert world_of(line("[0] 0.27 million parameters over 4 ranks, 512 tokens a step, 8.5 MB of text in 438 files")) == 4


def test_an_epoch_ends_before_the_next_one_begins() -> None:
    why = "[rank 0/4 epoch 1 step 66] rank 3 (172.19.0.4:42869) lost during all_gather #719 of blocks.0: its connection broke"
    found = epoch_of(line(f"[0] epoch 2 with 2 workers: it goes on behind step 65, 1.7 s after: {why}"))
    assert found is not None
    assert (found.workers, found.step, found.why) == (2, 65, why)
    assert found.at_s == pytest.approx(AT_S)
    assert found.at_s - found.ended_s == pytest.approx(1.7)


def test_nothing_is_found_where_nothing_was_said() -> None:
    assert Story().find(step_of) == []


def test_each_line_is_heard_once_whenever_it_was_said() -> None:
    """The engine reads a program's two outputs separately, and may pass on the later line first. It repeats a restarted container's log."""
    said = [f"2026-11-23T01:15:42.{fraction}Z [0] step {step} of 40: validation loss 5.5" for fraction, step in ((2, 8), (1, 7))]
    story = Story()
    for _ in range(2):
        with subprocess.Popen(["printf", "%s\\n", *said], stdout=subprocess.PIPE, text=True) as process:
            story._read("node", process)
    assert story.find(step_of) == [7, 8]
