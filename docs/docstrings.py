"""Our docstrings as reStructuredText, which is what Sphinx reads.

They are plain prose for whoever reads the code: single backticks around code, examples that are indented, lists of names and what they
mean in two columns, and drawings. Everything else is a paragraph, in which no character has a meaning of its own.
"""

import inspect
import re
from collections.abc import Iterator

_INDENT = "   "
_DRAWING = re.compile("[├└│─]")
_CODE = re.compile(r"`([^`]+)`")
_MAY_PRECEDE = re.compile(r"[\s(\[{<'\"/:-]")  # code, that is; between it and anything else Sphinx wants an escaped space
_MAY_FOLLOW = re.compile(r"[\s)\]}>'\"/:.,;!?-]")
_SPECIAL = re.compile(r"([\\*_|`])")
_BULLET = re.compile(r"(?:[-*]|\d+\.) ")
_ENTRY = re.compile(r"\S.*? {2,}(?=\S)")


def process(app: object, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """For Sphinx's event `autodoc-process-docstring`: rewrites the lines of a docstring in place."""
    if inspect.ismodule(obj) and hasattr(obj, "__path__"):  # what follows says to readers of the code where to begin
        lines[:] = lines[: [*lines, ""].index("")]
    lines[:] = rendered(lines)


def rendered(lines: list[str]) -> list[str]:
    """The lines of a docstring, without their common indent, as reStructuredText."""
    return [line for block in _blocks(lines) for line in (*_block(block), "")]


def entries(block: list[str]) -> list[tuple[str, list[str]]]:
    """What a block of two columns has: names, and the lines that stand beside each. Empty if it is anything else.

    A name that is too long for its column stands on a line of its own.
    """
    column = _column(block)
    found: list[tuple[str, list[str]]] = []
    for line in block:
        left, right = line[:column], line[column:]
        if not column or (right and right[0] == " "):
            return []
        if not left.strip():
            found[-1][1].append(right)
        elif not right or left.endswith("  "):
            found.append((left.strip(), [right] if right else []))
        elif len(line.split(", ")) == len(line.split()):  # names, and nothing but names
            found.append((line, []))
        else:
            return []
    return found if all(text for _, text in found) else []


def _column(block: list[str]) -> int:
    """At which the second column begins; 0 if there is none."""
    if block[0].startswith(" "):
        return 0
    if entry := _ENTRY.match(block[0]):
        return entry.end()
    second = block[1] if len(block) > 1 else ""
    return len(second) - len(second.lstrip())


def _blocks(lines: list[str]) -> Iterator[list[str]]:
    """What empty lines separate; examples stay whole, with the empty lines inside them."""
    block: list[str] = []
    gap = 0
    for line in lines:
        if not line.strip():
            gap += bool(block)
        elif gap and not (_is_literal(block) and line.startswith(" ")):
            yield block
            block, gap = [line], 0
        else:
            block += [""] * gap + [line]
            gap = 0
    if block:
        yield block


def _is_literal(block: list[str]) -> bool:
    return block[0].startswith(" ") or any(_DRAWING.search(line) for line in block)


def _block(block: list[str]) -> Iterator[str]:
    if _is_literal(block):
        language = "text" if any(_DRAWING.search(line) for line in block) else "python"
        indent = min(len(line) - len(line.lstrip()) for line in block if line)
        yield from (f".. code-block:: {language}", "", *((_INDENT + line[indent:]).rstrip() for line in block))
    elif named := entries(block):
        for name, text in named:
            yield _names(name)
            yield from (_INDENT + line for line in _text(text))
    else:
        yield from _text(block)


def _names(text: str) -> str:
    return ", ".join(f"``{name}``" for name in text.replace("`", "").split(", "))


def _text(lines: list[str]) -> list[str]:
    """Prose, with code in backticks that may go over the end of a line."""
    whole, at, parts = "\n".join(lines), 0, []
    for code in _CODE.finditer(whole):
        before = "" if code.start() == 0 or _MAY_PRECEDE.match(whole, code.start() - 1) else r"\ "
        after = "" if code.end() == len(whole) or _MAY_FOLLOW.match(whole, code.end()) else r"\ "
        parts += [_escaped(whole[at : code.start()]), f"{before}``{' '.join(code.group(1).split())}``{after}"]
        at = code.end()
    return ("".join(parts) + _escaped(whole[at:])).split("\n")


def _escaped(text: str) -> str:
    lines = []
    for line in text.split("\n"):
        bullet = _BULLET.match(line)
        start = bullet.end() if bullet else 0
        lines.append(line[:start] + _SPECIAL.sub(r"\\\1", line[start:]))
    return "\n".join(lines)
