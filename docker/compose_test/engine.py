"""`docker` and `docker-compose`, or the Compose plugin, as commands of this machine."""

import functools
import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from compose_test.console import Failure

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 60.0


def run(*words: str, environment: Mapping[str, str] | None = None, timeout_s: float = TIMEOUT_S) -> str:
    """What a command prints. Raises Failure with its error output if it fails or takes too long."""
    try:
        ended = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise Failure(f"`{' '.join(words)}` has not ended after {timeout_s:g} s") from None
    if ended.returncode:
        raise Failure(f"`{' '.join(words)}` ended with status {ended.returncode}: {ended.stderr.strip()[-2000:]}")
    return ended.stdout


def stream(*words: str, environment: Mapping[str, str] | None = None) -> Iterator[str]:
    """The lines that a command prints, as they come. The command is terminated if the caller stops reading. Raises Failure if it fails."""
    with subprocess.Popen(
        words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        try:
            assert process.stdout is not None
            yield from (line.rstrip() for line in process.stdout)
        except BaseException:
            process.terminate()
            raise
    if process.returncode:
        raise Failure(f"`{' '.join(words)}` ended with status {process.returncode}")


def succeeds(*words: str) -> bool:
    """Whether a command exists and succeeds."""
    try:
        run(*words)
    except (Failure, OSError):
        return False
    return True


def is_up() -> bool:
    return succeeds("docker", "info")


@functools.cache
def compose() -> tuple[str, ...]:
    """How Compose is called here; empty: there is none."""
    known = (("docker", "compose"), ("docker-compose",))
    return next((words for words in known if succeeds(*words, "version")), ())


def inspect(container: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run("docker", "inspect", container))[0]
    return found


def state(container: str) -> dict[str, Any]:
    found: dict[str, Any] = inspect(container)["State"]
    return found


def has_image(name: str) -> bool:
    return succeeds("docker", "image", "inspect", name)
