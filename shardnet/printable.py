"""`printable`: text of others, for log lines, terminals and pages."""

MOST = 1000  # characters


def printable(text: str, most: int = MOST) -> str:
    r"""`text` in one line of at most `most` characters. What cannot be printed is written as Python does (`\x1b`): escape sequences would
    change the terminal of whoever reads it, and line breaks would make it look like more lines of a log."""
    shown = "".join(character if character.isprintable() else repr(character)[1:-1] for character in text[:most])
    return shown if len(text) <= most and len(shown) <= most else f"{shown[:most]}…"
