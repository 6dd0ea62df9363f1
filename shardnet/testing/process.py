"""A process of a test's cluster: reads its task from a socket, and reports there."""

import importlib
import importlib.util
import json
import operator
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from shardnet.config import Limits, Timeouts
from shardnet.testing.conditions import Conditions
from shardnet.testing.fault import Action, Fault
from shardnet.testing.frames import frames_of, value_of
from shardnet.testing.harm import Kind
from shardnet.testing.part import Part
from shardnet.testing.rank_failure import RankFailure
from shardnet.testing.saboteur import Saboteur
from shardnet.training import Cluster, run
from shardnet.training.diagnosis import Diagnosis

MAIN = "__shardnet_main__"  # the name here of the test's `__main__` program: code that it runs as `__main__` must not run again


def main(descriptor: str) -> int:
    """Play one part, as the socket with this number says; the exit status is 0 even if it fails, because it has reported the failure."""
    Child(Connection(int(descriptor))).run()
    return 0


class Child:
    """The worker's end of the socket."""

    def __init__(self, channel: "Connection[Any, Any]") -> None:
        self._channel = channel
        self._saying = threading.Lock()
        self._done: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._diagnosis = Diagnosis()

    def run(self) -> None:
        job = json.loads(self._channel.recv_bytes())
        arguments = value_of(self._channel.recv_bytes(), self._channel.recv_bytes())
        os.environ.clear()
        os.environ.update(job["environment"])
        os.chdir(job["folder"])
        sys.path[:] = job["path"]
        torch.set_num_threads(1)
        threading.Thread(target=self._read, name="shardnet-test-orders", daemon=True).start()
        faults = {int(number): _fault(each) for number, each in job["faults"].items()}

        async def play() -> None:
            part = Part(_found(job), arguments, _settings(job["settings"]), job["every"])
            self._tell_result(await part.play(Saboteur(faults, self._act), self._joined))

        try:
            run(play)
        except BaseException as error:  # noqa: BLE001 - the test that ordered this process wants to know
            failure = RankFailure.of(error)
            self._say({"what": "failed", "kind": failure.kind, "message": failure.message, "traceback": failure.traceback})

    def _joined(self, cluster: Cluster) -> None:
        self._diagnosis.about(cluster.telemetry, lambda: cluster.topology)
        self._say({"what": "joined", "rank": cluster.rank})

    def _tell_result(self, result: object) -> None:
        frames = frames_of(result)  # fails for a value that cannot be sent, before anything is sent
        self._say({"what": "ended"}, *frames)

    def _act(self, number: int, fault: Fault) -> None:
        self._say({"what": "fired", "fault": number})
        match fault.action:
            case Action.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            case Action.FREEZE:
                os.kill(os.getpid(), signal.SIGSTOP)
            case Action.DELAY:
                time.sleep(fault.seconds)
            case _:
                self._done.get()

    def _say(self, message: dict[str, Any], *frames: bytes) -> None:
        with self._saying:
            for frame in (json.dumps(message).encode(), *frames):
                self._channel.send_bytes(frame)

    def _read(self) -> None:
        """Read orders to the end: then the process that gave them is gone, and this one is no longer needed."""
        try:
            while True:
                match json.loads(self._channel.recv_bytes()):
                    case {"what": "done"}:
                        self._done.put(None)
                    case {"what": "doing"}:
                        self._say({"what": "doing", "stacks": self._diagnosis.text(), "waits_for": self._diagnosis.waits_for()})
        except (EOFError, OSError):
            os.kill(os.getpid(), signal.SIGKILL)


def _found(job: dict[str, Any]) -> Callable[..., Any]:
    """The training function: from the module of that name if its file is the given one, otherwise from the file."""
    train: Callable[..., Any] = operator.attrgetter(job["train"])(_module(job["module"], job["file"]))
    return train


def _module(name: str, file: str) -> ModuleType:
    name = MAIN if name == "__main__" else name
    root = Path(file).parents[name.count(".")]
    if root.joinpath(*name.split(".")).with_suffix(".py") == Path(file):
        sys.path.append(str(root))  # after all other folders: pytest's importlib mode imports packages that are on no path
    with suppress(ImportError):
        module = importlib.import_module(name)
        if Path(module.__file__ or "").resolve() == Path(file):
            return module
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _settings(plain: dict[str, Any]) -> dict[str, Any]:
    kinds = {"timeouts": Timeouts, "limits": Limits}
    return {name: kinds[name](**each) if name in kinds else each for name, each in plain.items()}


def _fault(plain: dict[str, Any]) -> Fault:
    special = {"action": Action(plain["action"]), "kind": Kind(plain["kind"]), "conditions": Conditions(**plain["conditions"])}
    return Fault(**(plain | special))
