"""What a worker may say about itself."""

import dataclasses

import pytest

from shardnet.errors import AddressError, JoinRefused, UsageError
from shardnet.rendezvous import messages
from shardnet.rendezvous.refusal import Refusal
from shardnet.rendezvous.request import PROTOCOL, check_protocol
from tests.rendezvous.builders import worker


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"job": ""}, "job must not be empty"),
        ({"incarnation": ""}, "incarnation must not be empty"),
        ({"node": ""}, "node must not be empty"),
        ({"job": "x" * 257}, "job has 257 characters; at most 256"),
        ({"node": "a\nforged log line"}, "cannot be printed"),
        ({"min_world_size": 0}, "asked for 0 to 2 workers"),
        ({"min_world_size": 3}, "asked for 3 to 2 workers"),
        ({"max_world_size": 2**16 + 1}, "<= 65536"),
        ({"local_rank_hint": -1}, "local_rank_hint must not be negative, got -1"),
        ({"wished_rank": -1}, "wished_rank must be from 0 to 65535, got -1"),
        ({"wished_rank": 2**16}, "wished_rank must be from 0 to 65535, got 65536"),
        ({"address": "10.0.0.1:0"}, "peers cannot call 10.0.0.1:0"),
        ({"address": "0.0.0.0:7000"}, r"peers cannot call 0\.0\.0\.0:7000; join with the host"),
        ({"address": "[::]:7000"}, "peers cannot call"),
    ],
)
def test_nonsense_is_refused_at_construction(change: dict[str, object], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        dataclasses.replace(worker(0), **change)  # type: ignore[arg-type]


def test_address_must_be_one() -> None:
    with pytest.raises(AddressError, match="does not end in a port"):
        worker(0, address="somewhere")


def test_longest_text_is_allowed() -> None:
    assert len(dataclasses.replace(worker(0), job="x" * 256).job) == 256


@pytest.mark.parametrize("wish", [None, 0, 7])
def test_survives_the_wire(wish: int | None) -> None:
    request = dataclasses.replace(worker(3, least=2, most=5, node="n/1", hint=4, job="j"), wished_rank=wish)
    assert messages.read_request(messages.write_request(request)) == request


def test_other_protocol_is_named_with_both_versions() -> None:
    with pytest.raises(
        JoinRefused, match=rf"the worker speaks protocol 99 \(shardnet '7\.0'\) and this rendezvous protocol {PROTOCOL}"
    ) as caught:
        check_protocol(99, "7.0")
    assert caught.value.reason == Refusal.PROTOCOL


def test_other_protocol_is_found_before_anything_else() -> None:
    message = messages.write_request(worker(0))
    message.protocol, message.address, message.min_world_size = 99, "its form has changed", 0
    with pytest.raises(JoinRefused) as caught:
        messages.read_request(message)
    assert caught.value.reason == Refusal.PROTOCOL


def test_nonsense_from_the_wire_is_a_refusal() -> None:
    message = messages.write_request(worker(0))
    message.min_world_size = 0
    with pytest.raises(JoinRefused, match="the join request is not valid: asked for 0 to 2 workers") as caught:
        messages.read_request(message)
    assert caught.value.reason == Refusal.MALFORMED
