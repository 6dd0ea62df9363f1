"""A table of text."""

from collections.abc import Collection, Sequence

Row = Sequence[str]


def grid(head: Row, rows: Sequence[Row], words: Collection[str]) -> str:
    """Columns as wide as their widest cell, two blanks apart. Numbers are aligned to the right; `words` names the other columns."""
    table = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    cells = ([c.ljust(w) if title in words else c.rjust(w) for c, w, title in zip(row, widths, head, strict=True)] for row in table)
    return "\n".join("  ".join(row).rstrip() for row in cells)
