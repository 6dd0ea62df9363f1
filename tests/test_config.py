"""Settings that make no sense are refused when they are made."""

from typing import Any

import pytest

from shardnet.config import Limits, Timeouts
from shardnet.errors import UsageError


@pytest.mark.parametrize("name", Timeouts.__dataclass_fields__)
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_a_timeout_is_more_than_nothing(name: str, value: float) -> None:
    given: dict[str, Any] = {name: value}
    with pytest.raises(UsageError, match=rf"Timeouts\.{name} must be positive, got {value}"):
        Timeouts(**given)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"chunk_bytes": 0}, "chunk_bytes must be positive, got 0"),
        ({"max_outstanding": 0}, "max_outstanding must be positive, got 0"),
        ({"eager_bytes": -1}, "eager_bytes must not be negative, got -1"),
        ({"inline_bytes": -1}, "inline_bytes must not be negative, got -1"),
        ({"letter_bytes": -1}, "letter_bytes must not be negative, got -1"),
        ({"chunk_bytes": 64, "window_bytes": 127}, r"window_bytes \(127\) must be at least twice chunk_bytes \(64\)"),
        ({"chunk_bytes": 12}, "chunk_bytes must be a multiple of 8"),
        ({"chunk_bytes": 64, "max_message_bytes": 1024}, r"max_message_bytes \(1024\) must exceed chunk_bytes \(64\) by at least 64 KiB"),
    ],
)
def test_limits_fit_each_other(given: dict[str, int], complaint: str) -> None:
    with pytest.raises(UsageError, match=rf"Limits\.{complaint}"):
        Limits(**given)
