"""Text of others."""

import pytest

from shardnet.printable import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("all is well", "all is well"),
        ("größer als 3 µs", "größer als 3 µs"),
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("one\n[rank 0] two", r"one\n[rank 0] two"),
        ("right\u202eleft", r"right\u202eleft"),
        ("\ud800", r"\ud800"),
        ("", ""),
    ],
)
def test_what_cannot_be_printed_is_named(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_it_is_no_longer_than_asked_for() -> None:
    assert printable("abcdef", 3) == "abc…"
    assert printable("\x1b" * 3, 6) == r"\x1b\x" + "…"
