"""The flight recorder's ring."""

from shardnet.flight import Flight, FlightRecorder, Party, State

WORLD, PAIR = Party(1, 0, (0, 1, 2)), Party(1, 7, (0, 2))


def flight(sequence: int, party: Party = WORLD, label: str = "") -> Flight:
    return Flight(party, sequence, "all_gather", label, step=3, begun_ns=1)


def test_it_keeps_the_last_ones() -> None:
    recorder = FlightRecorder(size=4)
    for sequence in range(10):
        recorder.begin(flight(sequence))
    assert [each.sequence for each in recorder.last()] == [6, 7, 8, 9]
    assert [each.sequence for each in recorder.last(2)] == [8, 9]
    assert len(FlightRecorder().last()) == 0


def test_a_record_is_named_as_errors_name_the_collective() -> None:
    assert (flight(841, label="layer4.mlp").name, WORLD.title) == ("all_gather #841 of layer4.mlp", "the world")
    assert (flight(3).name, PAIR.title) == ("all_gather #3", "the group of ranks [0, 2]")


def test_how_it_ended_and_who_hears_of_it() -> None:
    recorder, heard = FlightRecorder(), []
    good, bad, silent = (recorder.begin(flight(sequence)) for sequence in range(3))
    recorder.end(silent, 2, ValueError())
    recorder.on_failure = lambda failed, error: heard.append((failed, str(error)))
    recorder.end(good, 2, None)
    recorder.end(bad, 3, ConnectionError("why"))
    assert [(each.state, each.error, each.ended_ns) for each in (good, bad)] == [(State.DONE, "", 2), (State.FAILED, "ConnectionError", 3)]
    assert heard == [(bad, "why")]
