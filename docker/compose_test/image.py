"""The image that all containers run, made from a base image that is available."""

import os
import re
import shutil
from collections.abc import Mapping

from compose_test.console import Failure, headline, say
from compose_test.engine import ROOT, compose, has_image, run, stream, succeeds

PUBLIC_BASE = "python:3.11-slim"
OWN_BASE = "shardnet-base:bookworm"
PULL_S = 300.0
_TAIL = 40  # lines shown of a failed build
_WORTH_SAYING = re.compile(r"^(Step \d+/\d+ : (FROM|RUN|COPY)|#\d+ \[|Successfully)|(Resolved|Prepared|Installed|compiled) \d+|Bytecode")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def base_image() -> str | None:
    """The base image: one that was named or is present, one from a registry, or one made here. None if none of these is possible."""
    given = os.environ.get("BASE_IMAGE")
    if given:
        return given
    there = next((name for name in (PUBLIC_BASE, OWN_BASE) if has_image(name)), None)
    if there is not None:
        return there
    headline(f"a base image: {PUBLIC_BASE} from its registry, else one of Debian packages")
    try:
        run("docker", "pull", "--quiet", PUBLIC_BASE, timeout_s=PULL_S)
    except Failure as failure:
        say(str(failure))
    else:
        return PUBLIC_BASE
    if os.geteuid() or not (shutil.which("debootstrap") or succeeds("apt-get", "--version")):
        return None
    _watch(str(ROOT / "docker" / "make-base-image"), OWN_BASE, wanted=re.compile("^(I: (Retrieving Packages|Base system)|made)"))
    return OWN_BASE


def build(environment: Mapping[str, str]) -> None:
    """Build the image. If that fails, show the last lines and raise Failure."""
    headline(f"building {environment['IMAGE']} from {environment['BASE_IMAGE']}")
    # The plugin's builder uses no containers; docker-compose's leaves one after a failed build.
    _watch(*compose(), "build", *(["--force-rm"] if len(compose()) == 1 else []), environment=environment, wanted=_WORTH_SAYING)


def _watch(*words: str, environment: Mapping[str, str] | None = None, wanted: re.Pattern[str]) -> None:
    """Say some of the lines of a command, and the last ones if it fails."""
    lines: list[str] = []
    try:
        for line in stream(*words, environment=environment):
            text = _COLOURS.sub("", line).strip()
            lines.append(text)
            if wanted.search(text):
                say(text[:140])
    except Failure:
        print(*lines[-_TAIL:], sep="\n", flush=True)
        raise
