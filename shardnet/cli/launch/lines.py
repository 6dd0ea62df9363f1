"""`LineSplitter`: turns the bytes of one stream into the lines that a reader would see."""

import codecs
import re
from collections.abc import Iterator
from dataclasses import dataclass

MAX_LINE_CHARS = 64 * 1024  # a longer line is shown in pieces, so that a stream without line ends needs no more memory

# A carriage return at the very end stays unmatched: whether it belongs to a "\r\n" shows only with the next byte.
_END = re.compile(r"\r*\n|\r+(?=[^\r\n])")


@dataclass(frozen=True, slots=True)
class Line:
    """One line without its end.

    overwritten  a carriage return ended it: a terminal would have drawn the next line over it, as progress bars do
    """

    text: str
    overwritten: bool = False


class LineSplitter:
    """The unfinished line of one stream. Bytes that are not UTF-8 are shown as \\xNN; nothing is dropped."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._rest = ""

    def feed(self, data: bytes) -> list[Line]:
        """The lines that `data` completes."""
        return list(self._split(self._decoder.decode(data)))

    def finish(self) -> list[Line]:
        """The stream has ended: what is left, as a line."""
        lines = list(self._split(self._decoder.decode(b"", final=True)))
        rest, self._rest = self._rest.rstrip("\r"), ""
        return [*lines, Line(rest)] if rest else lines

    def _split(self, new: str) -> Iterator[Line]:
        text = self._rest + new
        start = 0
        for end in _END.finditer(text):
            yield from _lines(text[start : end.start()], overwritten=not end.group().endswith("\n"))
            start = end.end()
        self._rest = text[start:]
        while len(self._rest) > MAX_LINE_CHARS:
            yield Line(self._rest[:MAX_LINE_CHARS])
            self._rest = self._rest[MAX_LINE_CHARS:]


def _lines(text: str, *, overwritten: bool) -> Iterator[Line]:
    if overwritten and not text:  # progress bars begin with a carriage return
        return
    while len(text) > MAX_LINE_CHARS:
        yield Line(text[:MAX_LINE_CHARS])
        text = text[MAX_LINE_CHARS:]
    yield Line(text, overwritten)
