"""The parts of docs/schedulers.md."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "schedulers.md").read_text()


def block(heading: str, language: str) -> str:
    """The first code block of a language below a heading."""
    _, found, section = PAGE.partition(f"\n## {heading}\n")
    assert found, f"the page has no heading {heading!r}"
    code = re.search(rf"```{language}\n(.*?)```", section.partition("\n## ")[0], re.DOTALL)
    assert code is not None, f"there is no {language} below {heading!r}"
    return code.group(1)


def commands() -> list[str]:
    """All commands that are typed at a prompt or are in a script, each on one line."""
    text = PAGE.replace("\\\n", " ")
    scripts = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL))
    lines = re.findall(r"^\$ (.*)$", text, re.MULTILINE) + scripts.splitlines()
    return [" ".join(line.split()) for line in lines]
