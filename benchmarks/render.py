"""Tables as text for a terminal, and as Markdown."""

from benchmarks.tables import Table


def as_text(table: Table) -> str:
    """Columns as wide as their widest cell, two blanks apart; numbers are right-aligned."""
    columns = list(zip(table.head, *table.rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    lines = [
        "  ".join(cell.rjust(width) if right else cell.ljust(width) for cell, width, right in zip(row, widths, _right(table), strict=True))
        for row in (table.head, *table.rows)
    ]
    return "\n".join([table.title, *(line.rstrip() for line in lines)])


def as_markdown(table: Table) -> str:
    rule = ["---:" if right else "---" for right in _right(table)]
    return "\n".join([f"**{table.title}**", "", *(f"| {' | '.join(row)} |" for row in (table.head, rule, *table.rows))])


def _right(table: Table) -> list[bool]:
    """For each column, whether its cells begin like numbers (an empty cell may be one)."""
    return [all(not cell or cell[0].isdigit() for cell in column) for column in zip(*table.rows, strict=True)]
