"""`Cluster`: the containers of one `docker compose up`, and taking down everything that it has made."""

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from typing import Any, Self

from compose_test.console import Failure, say
from compose_test.engine import compose, inspect, run, state
from compose_test.story import Line, Story, world_of

SECONDS = 900  # a training ends after these in any case
STOP_FILE = "/tmp/stop"
START_S = 180.0  # from `up` to the first step; interpreters start slowly on a busy machine
NODES = 2
WORKERS = 2
# Small, so that any machine does some steps per second, and with a line of output for each step.
TRAINING = "--dim 64 --layers 2 --context 64 --batch 2 --bigrams 8 --valid-every 1 --valid-windows 4 --sample-bytes 0"


class Cluster:
    """One project of Compose. `with` takes it down, volumes included, however it ends."""

    def __init__(self, image: str) -> None:
        self.project = f"shardnet-test-{os.getpid()}"
        self.story = Story()
        self._environment = os.environ | {
            "IMAGE": image,
            "NODES": str(NODES),
            "WORKERS": str(WORKERS),
            "STEPS": "1000000",
            "TRAINING": f"--max-seconds {SECONDS} --stop-file {STOP_FILE} {TRAINING}",
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        with _undisturbed():
            if kind is not None:
                print(*self.story.tail(80), sep="\n", flush=True)
            self._take_down()

    def up(self, nodes: int = NODES) -> None:
        """Start what is not running, so that there are `nodes` nodes."""
        self._compose("up", "--detach", "--no-build", "--no-recreate", "--scale", f"node={nodes}", timeout_s=120)
        self.listen()

    def listen(self) -> None:
        for container in self.nodes:
            self.story.listen(container)

    def containers(self, service: str) -> list[str]:
        """The containers of a service, in the order of their numbers."""
        labels = [f"label=com.docker.compose.project={self.project}", f"label=com.docker.compose.service={service}"]
        found = run("docker", "ps", "--all", "--quiet", "--no-trunc", *(word for label in labels for word in ("--filter", label))).split()
        return sorted(found, key=lambda each: int(inspect(each)["Config"]["Labels"]["com.docker.compose.container-number"]))

    @property
    def nodes(self) -> list[str]:
        return self.containers("node")

    @property
    def rendezvous(self) -> str:
        (found,) = self.containers("rendezvous")
        return found

    @property
    def network(self) -> str:
        return f"{self.project}_cluster"

    @property
    def runs(self) -> bool:
        """Whether any node runs; a frozen one counts."""
        return any(state(each)["Running"] for each in self.nodes)

    def wait_for_world(self, workers: int, *, since_s: float = 0.0, timeout_s: float = START_S) -> float:
        """Wait until `workers` workers train together; return when that began."""

        def grown(line: Line) -> float | None:
            return line.at_s if world_of(line) == workers else None

        what = f"a training over {workers} ranks"
        return self.story.wait(grown, since_s=since_s, timeout_s=timeout_s, what=what, alive=lambda: self.runs)

    def status(self) -> dict[str, Any]:
        """What `shardnet status` says of the job."""
        job: dict[str, Any]
        (job,) = json.loads(run("docker", "exec", self.rendezvous, "shardnet", "status", "127.0.0.1:7000", "--json"))["jobs"]
        return job

    def end_training(self) -> None:
        """End the training now, in the way that it would end by itself. One node is told, and tells the others."""
        run("docker", "exec", self.nodes[-1], "touch", STOP_FILE)

    def wait_for_end(self, timeout_s: float) -> None:
        """Wait until all containers have ended by themselves. Raises Failure if one does not, or ends with another status than 0."""
        everyone = {container: service for service in ("node", "rendezvous", "token") for container in self.containers(service)}
        deadline_s = time.monotonic() + timeout_s
        while running := [container for container in everyone if state(container)["Running"]]:
            if time.monotonic() > deadline_s:
                names = ", ".join(f"{everyone[container]} {container[:12]}" for container in running)
                raise Failure(f"{names} has not ended after {timeout_s:.0f} s")
            time.sleep(0.5)  # the engine can only be asked to wait for one container
        for container, service in everyone.items():
            self._check_end(service, container)

    def _check_end(self, service: str, container: str) -> None:
        status = state(container)["ExitCode"]
        if status:
            print(run("docker", "logs", "--tail", "40", container), flush=True)
            raise Failure(f"{service} {container[:12]} ended with status {status}")

    def _compose(self, *words: str, timeout_s: float = 60.0) -> None:
        run(*compose(), "--project-name", self.project, *words, environment=self._environment, timeout_s=timeout_s)

    def _take_down(self) -> None:
        try:
            for container in run("docker", "ps", "--quiet", "--filter", f"name={self.project}", "--filter", "status=paused").split():
                run("docker", "unpause", container)
            self._compose("down", "--volumes", "--remove-orphans", "--timeout", "3", timeout_s=120)
        except Failure as failure:
            say(f"something may be left of {self.project}: {failure}")
        self.story.close()


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Ignore signals meanwhile: a second Ctrl-C would leave containers behind."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
