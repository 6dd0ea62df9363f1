"""From bytes to lines."""

import pytest

from shardnet.cli.launch.lines import MAX_LINE_CHARS, Line, LineSplitter


def split(*pieces: bytes) -> list[Line]:
    splitter = LineSplitter()
    return [line for piece in pieces for line in splitter.feed(piece)] + splitter.finish()


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", []),
        (b"a\nb\n", [Line("a"), Line("b")]),
        (b"a\n\nb", [Line("a"), Line(""), Line("b")]),
        (b"a\r\nb\r\n", [Line("a"), Line("b")]),
        (b"\r 1%\r 2%\n", [Line(" 1%", overwritten=True), Line(" 2%")]),
        (b"1%\r2%\r", [Line("1%", overwritten=True), Line("2%")]),
        (b"\r", []),
        (b"\n", [Line("")]),
        ("é\u2028\x0b\x0c\x85 stay in the line\n".encode(), [Line("é\u2028\x0b\x0c\x85 stay in the line")]),
        (b"\xff\xc3(\xe2\x82\n", [Line("\\xff\\xc3(\\xe2\\x82")]),
        (b"cut off \xe2\x82", [Line("cut off \\xe2\\x82")]),
    ],
)
def test_lines_do_not_depend_on_how_the_bytes_arrive(data: bytes, lines: list[Line]) -> None:
    assert split(data) == lines
    assert split(*(data[i : i + 1] for i in range(len(data)))) == lines


def test_a_line_without_end_is_cut_but_complete() -> None:
    data = "ä".encode() * (3 * MAX_LINE_CHARS)
    pieces = split(*(data[i : i + 999] for i in range(0, len(data), 999)))
    assert "".join(line.text for line in pieces).encode() == data
    assert max(len(line.text) for line in pieces) <= MAX_LINE_CHARS


def test_a_long_line_that_comes_at_once_is_cut_the_same() -> None:
    data = b"x" * (2 * MAX_LINE_CHARS + 1) + b"\n"
    assert [len(line.text) for line in split(data)] == [MAX_LINE_CHARS, MAX_LINE_CHARS, 1]
