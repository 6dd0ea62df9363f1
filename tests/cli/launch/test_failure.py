"""Which worker is to blame."""

import pytest

from shardnet.cli.launch.failure import Exit, announce, culprit, describe, describe_losses, last_straw


def end(label: str, code: int, at: float, *, was_ended: bool = False, tail: tuple[str, ...] = ()) -> Exit:
    return Exit(label, code, 0.0, at, was_ended, tail)


LOST = ("Traceback (most recent call last):", "shardnet.errors.PeerLost: rank 1 is gone; call reform()")
OWN = ("Traceback (most recent call last):", "ValueError: boom")
CAUSE = "The above exception was the direct cause of the following exception:"
DURING = "During handling of the above exception, another exception occurred:"


def test_nobody_when_all_is_well() -> None:
    assert culprit([end("rank 0", 0, 1.0), end("rank 1", 0, 2.0)]) is None


def test_the_first_of_equals() -> None:
    assert culprit([end("rank 0", 1, 2.0), end("rank 1", 1, 1.0)]) == end("rank 1", 1, 1.0)


def test_an_own_error_rather_than_an_earlier_lost_peer() -> None:
    assert culprit([end("rank 0", 1, 1.0, tail=LOST), end("rank 1", 1, 2.0, tail=OWN)]) == end("rank 1", 1, 2.0, tail=OWN)


def test_a_lost_peer_rather_than_what_the_launcher_ended() -> None:
    assert culprit([end("rank 0", 1, 2.0, tail=LOST), end("rank 1", -15, 1.0, was_ended=True)]) == end("rank 0", 1, 2.0, tail=LOST)


def test_an_own_error_of_the_lost_peer_even_if_the_launcher_ended_it() -> None:
    """It tells the others before it ends, so one of them may end first."""
    lost = ("Traceback (most recent call last):", "shardnet.errors.PeerLost: [rank 0/2] rank 1 (10.0.0.1:7) lost during barrier #3: boom")
    witness = end("rank 0", 1, 1.0, tail=lost)
    assert culprit([witness, end("rank 1", 1, 2.0, was_ended=True, tail=OWN)]) == end("rank 1", 1, 2.0, was_ended=True, tail=OWN)
    assert culprit([witness, end("rank 1", -15, 2.0, was_ended=True)]) == witness, "nothing says that it failed by itself"
    assert culprit([witness, end("rank 2", 1, 2.0, was_ended=True, tail=OWN)]) == witness, "the lost one is on another machine"
    wrapping = end("rank 0", 1, 1.0, tail=(*lost, "", CAUSE, "", "Traceback (most recent call last):", "RuntimeError: step 3"))
    assert culprit([wrapping, end("rank 1", 1, 2.0, was_ended=True, tail=OWN)]) == end("rank 1", 1, 2.0, was_ended=True, tail=OWN)


@pytest.mark.parametrize(
    ("tail", "consequence"),
    [
        (LOST, True),
        (("  | shardnet.errors.PeerLost: rank 1 is gone", "  +------------------------------------"), True),
        (("shardnet.errors.Preempted: rank 1 was told to leave",), True),
        (("PeerLost",), True),
        (OWN, False),
        ((*LOST, "", DURING, "", *OWN), True),
        ((*LOST, "", CAUSE, "", *OWN), True),
        ((*LOST, "", CAUSE, "", *OWN, "", DURING, "", *OWN), True),
        ((*OWN, "", CAUSE, "", *LOST), True),
        ((*OWN, "", CAUSE, "", *OWN), False),
        ((*LOST, "it goes on", *OWN, "", CAUSE, "", *OWN), False),
        ((*LOST, "", CAUSE, "", *OWN, "it goes on", *OWN), False),
        (("the log says PeerLost: twice", *OWN), False),
        ((), False),
    ],
)
def test_only_the_last_error_and_what_it_was_raised_because_of_count(tail: tuple[str, ...], consequence: bool) -> None:
    assert end("rank 0", 1, 1.0, tail=tail).is_consequence is consequence


def test_statuses_are_a_shells() -> None:
    assert [end("", code, 0.0).status for code in (0, 3, -9, -15)] == [0, 3, 137, 143]


def test_the_description_ends_with_the_workers_own_error() -> None:
    assert describe(end("rank 2", 1, 0.0, tail=OWN), 1).splitlines() == [
        "rank 2 failed: exit code 1; 1 other ended with it. The end of its stderr:",
        "    Traceback (most recent call last):",
        "    ValueError: boom",
    ]


def test_what_stands_above_is_not_repeated() -> None:
    assert (
        describe(end("rank 2", 1, 0.0, tail=OWN), 0, stands_above=True) == "rank 2 failed: exit code 1. The end of its stderr stands above."
    )


@pytest.mark.parametrize(
    ("tail", "words"),
    [(("step 1", *LOST, "", *OWN), OWN), (("step 1", "no data"), ("no data",)), ((), ()), ((*OWN, "goodbye"), (*OWN, "goodbye"))],
)
def test_last_words_are_the_last_traceback_or_line(tail: tuple[str, ...], words: tuple[str, ...]) -> None:
    assert end("rank 2", 1, 0.0, tail=tail).last_words == words


def test_a_kill_from_outside_is_explained() -> None:
    assert describe(end("rank 2", -9, 0.0), 0) == (
        "rank 2 failed: killed by SIGKILL (the system does this when memory runs out). It wrote nothing to stderr."
    )


def test_an_elastic_job_ends_with_its_last_failure_of_its_own() -> None:
    ends = [end("rank 0", 1, 1.0), end("rank 1", 2, 2.0), end("rank 2", 1, 3.0, tail=LOST), end("rank 3", -15, 4.0, was_ended=True)]
    assert last_straw(ends) == ends[1]
    assert last_straw([end("rank 0", 0, 1.0)]) is None


def test_too_few_that_are_left_are_told() -> None:
    assert describe(end("rank 2", 1, 0.0), 1, 3) == (
        "rank 2 failed: exit code 1; 1 other ended with it; fewer than 3 workers cannot go on. It wrote nothing to stderr."
    )
    assert (
        describe(end("rank 2", 1, 0.0), 0, 3)
        == "rank 2 failed: exit code 1; fewer than 3 workers cannot go on. It wrote nothing to stderr."
    )
    assert describe(end("rank 2", 1, 0.0), 0, 1) == "rank 2 failed: exit code 1. It wrote nothing to stderr."


@pytest.mark.parametrize(
    ("tail", "told"),
    [
        ((), ""),
        (OWN, ". Its last line on stderr:\n    ValueError: boom"),
        (("    | ValueError: boom", "    +-----------", ""), ". Its last line on stderr:\n    | ValueError: boom"),
    ],
)
def test_in_the_middle_of_a_run_few_words_are_made(tail: tuple[str, ...], told: str) -> None:
    assert announce(end("rank 2", 1, 0.0, tail=tail), "the others go on") == f"rank 2 failed: exit code 1; the others go on{told}"


def test_a_line_of_before_does_not_explain_a_kill() -> None:
    killed = end("rank 2", -9, 0.0, tail=("epoch 2 with 2 workers: it goes on behind step 7",))
    assert announce(killed, "the others go on") == (
        "rank 2 failed: killed by SIGKILL (the system does this when memory runs out); the others go on"
    )


def test_who_was_told_to_leave_has_not_failed() -> None:
    left = end("rank 2", 143, 3.0, tail=("rank 2 leaves, as it was told, after step 7",))
    assert announce(left, "the others go on") == "rank 2 left after SIGTERM; the others go on"
    assert describe(left, 0, stands_above=True) == "rank 2 left after SIGTERM", "the last one of this machine"
    assert describe_losses([left], []) == "1 worker left on the way: rank 2 (exit code 143 after SIGTERM)"
    assert describe_losses([left], [left]).startswith("2 workers left on the way: rank 2")
    assert describe_losses([left], [end("rank 1", 1, 2.0)]) == (
        "2 workers were lost on the way: rank 1 (exit code 1, replaced), rank 2 (exit code 143 after SIGTERM)"
    )


def test_losses_are_told_in_the_order_in_which_they_came() -> None:
    assert describe_losses([end("rank 3", 1, 2.0)], []) == "1 worker was lost on the way: rank 3 (exit code 1)"
    assert describe_losses([end("rank 3", 1, 2.0)], [end("rank 1", -9, 1.0)]) == (
        "2 workers were lost on the way: rank 1 (killed by SIGKILL, replaced), rank 3 (exit code 1)"
    )
