"""Errors: which of Python's errors they also are, and that they can go from one process to another."""

import pickle
from collections.abc import Iterator

import pytest

from shardnet import errors

WITH_MORE = [
    errors.InvalidRankError(3, 2, "broadcast root"),
    errors.SelfSendError(1),
    errors.SizeMismatchError(4, 5, "rows"),
    errors.PlaintextRefused("a problem"),
    errors.CollectiveTimeout("late", [1, 2]),
    errors.PeerLost("gone", 3),
    errors.JoinRefused("full", "FULL"),
    errors.InheritedError("[rank 0/2]"),
]


def _all(kind: type[errors.ShardnetError]) -> Iterator[type[errors.ShardnetError]]:
    for each in kind.__subclasses__():
        yield each
        yield from _all(each)


PLAIN = [
    kind("what was wrong") for kind in _all(errors.ShardnetError) if kind.__module__ == errors.__name__ and "__init__" not in vars(kind)
]


@pytest.mark.parametrize("error", [*WITH_MORE, *(each for each in PLAIN if type(each) not in map(type, WITH_MORE))], ids=repr)
def test_they_can_be_pickled(error: errors.ShardnetError) -> None:
    error.add_note("and a note")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert (str(again), again.args, vars(again)) == (str(error), error.args, vars(error))


@pytest.mark.parametrize("kind", [errors.CollectiveMismatch, errors.CollectiveTimeout, errors.PeerLost, errors.ClosedError])
def test_those_of_collectives_are_what_torch_raises(kind: type[Exception]) -> None:
    assert issubclass(kind, RuntimeError)
