"""Groups of contestants as processes: they step in turn, or one of them dies."""

import json
import os
import queue
import signal
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from benchmarks.gauges import loopback_bytes, watched

ROOT = Path(__file__).resolve().parents[2]
SILENCE_S = 300.0  # longer than any engine's step or timeout; DeepSpeed compiles at its first start
WARM_UP = 2
WATCHED = 2  # steps in which memory is read; these are not timed, since reading takes time


class ContestantFailed(Exception):
    """A contestant ended, or said nothing for too long; the end of its log is in the message."""


@dataclass(frozen=True, slots=True)
class Engine:
    """One way to train."""

    name: str
    peer: str  # its library: with_{peer}.py is its program, and its virtual environment is named after it
    arguments: tuple[str, ...] = ()


@dataclass(slots=True)
class Figures:
    """What was measured of one engine in a race."""

    name: str
    steps_s: list[float] = field(default_factory=list)  # each of its slowest rank
    losses: list[float] = field(default_factory=list)  # mean over ranks of every step, warm-up included
    sent_bytes: list[float] = field(default_factory=list)  # per step, by all ranks together, one number per round
    peak_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Loss:
    """What a `kill -9` cost the survivors."""

    step_s: float  # median before it
    resumed_s: float  # from the kill until all survivors had done a step without the dead rank
    lost: int  # steps that were done and had to be done again
    vain: int  # steps that were begun and came to nothing, on the survivor with the most of them


class Group:
    """The processes of one engine: its ranks, and the one through which they find each other."""

    def __init__(self, engine: Engine, python: Path, ranks: int, least: int, logs: Path) -> None:
        self._engine, self._python, self._ranks = engine, python, ranks
        self._log_path = logs / f"{engine.name}.log".replace(" ", "-")
        self._log: IO[bytes] = self._log_path.open("wb")
        self._said: queue.SimpleQueue[tuple[int, dict[str, Any] | None]] = queue.SimpleQueue()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._port = port = free_port()
        self._environment = {
            **os.environ,
            "PATH": f"{python.parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "CUDA_VISIBLE_DEVICES": "",
            "DS_ACCELERATOR": "cpu",
            "GLOO_SOCKET_IFNAME": "lo",
            "LEAST": str(least),
            "LOCAL_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "WORLD_SIZE": str(ranks),
        }
        try:
            self._environment["MEETING"] = self._meet(port, least)
            for rank in range(ranks):
                self._start(rank, [*self._program, *engine.arguments], RANK=str(rank), LOCAL_RANK=str(rank))
            for rank in range(ranks):
                self._hear(rank, "ready")
        except BaseException:
            self.close()
            raise

    @property
    def _program(self) -> list[str]:
        return [str(self._python), "-m", f"benchmarks.peers.with_{self._engine.peer}"]

    def _meet(self, port: int, least: int) -> str:
        """Start the process through which the ranks find each other, as number -1."""
        match self._engine.peer:
            case "shardnet":
                command = "import sys; from shardnet.cli.main import main; sys.exit(main())"
                self._start(-1, [str(self._python), "-c", command, "rendezvous", "--listen", f"127.0.0.1:{port}"])
                return f"127.0.0.1:{port}"
            case "torchft":
                lighthouse = str(self._python.with_name("torchft_lighthouse"))
                timeouts = ["--quorum_tick_ms", "100", "--join_timeout_ms", "10000"]  # as its README has it
                self._start(-1, [lighthouse, "--bind", f"127.0.0.1:{port}", "--min_replicas", str(least), *timeouts])
                return f"http://127.0.0.1:{port}"
            case "hivemind":
                self._start(-1, [*self._program, "meet"])
                return str(self._hear(-1, "meeting")["meeting"])
        return ""

    def _start(self, number: int, command: Sequence[str], **environment: str) -> None:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=self._environment | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,  # a rank may be several processes, which are watched together and die together
        )
        self._processes[number] = process
        threading.Thread(target=self._listen, args=(number, process), daemon=True).start()

    def _listen(self, number: int, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                with suppress(ValueError):  # DeepSpeed logs to stdout
                    if isinstance(said := json.loads(line), dict):
                        self._said.put((number, said))
        self._said.put((number, None))

    def _next(self, but: int | None = None) -> tuple[int, dict[str, Any]]:
        """What the next contestant says; `but` is ignored."""
        while True:
            try:
                number, said = self._said.get(timeout=SILENCE_S)
            except queue.Empty:
                raise ContestantFailed(f"{self._engine.name}: silent for {SILENCE_S:g} s\n{self._end_of_log()}") from None
            if number == but:
                continue
            if said is None:
                raise ContestantFailed(f"{self._engine.name}: rank {number} ended\n{self._end_of_log()}")
            return number, said

    def _hear(self, number: int, what: str) -> dict[str, Any]:
        """Wait until contestant `number` says `what`. What others say meanwhile is put back."""
        others = list[tuple[int, dict[str, Any]]]()
        while True:
            speaker, said = self._next()
            if speaker == number and what in said:
                for other in others:
                    self._said.put(other)
                return said
            others.append((speaker, said))

    def _end_of_log(self) -> str:
        return "\n".join(self._log_path.read_text(errors="replace").splitlines()[-30:])

    def _tell(self, steps: int) -> None:
        for number in range(self._ranks):
            pipe = self._processes[number].stdin
            assert pipe is not None
            with suppress(BrokenPipeError):  # its other pipe tells that it has ended
                pipe.write(b"%d\n" % steps)
                pipe.flush()

    def turn(self, steps: int, figures: Figures, *, counts: bool) -> None:
        """Do `steps` steps, while all other groups wait."""
        before = loopback_bytes()
        self._tell(steps)
        heard: list[list[dict[str, Any]]] = [[] for _ in range(self._ranks)]
        while min(map(len, heard)) < steps:
            number, said = self._next()
            if "step" in said:
                heard[number].append(said)
        for each in zip(*heard, strict=True):
            figures.losses.append(statistics.mean(said["loss"] for said in each))
            if counts:
                figures.steps_s.append(max(said["ended_s"] - said["began_s"] for said in each))
        if counts:
            figures.sent_bytes.append((loopback_bytes() - before) / steps)

    def watched_turn(self, steps: int, figures: Figures) -> None:
        with watched(self._pids) as peak:
            self.turn(steps, figures, counts=False)
        figures.peak_bytes = peak[0]

    def _pids(self) -> Iterator[int]:
        """Of all processes of this group, and of those that they have started."""
        leaders = {process.pid for process in self._processes.values()}
        for path in Path("/proc").iterdir():
            with suppress(ValueError, ProcessLookupError):
                if os.getsid(pid := int(path.name)) in leaders:
                    yield pid

    def lose_one(self, steps: int) -> Loss:
        """After `steps` steps of all ranks, kill the last rank in the middle of the next one."""
        self._tell(1_000_000)
        heard: list[list[dict[str, Any]]] = [[] for _ in range(self._ranks)]
        victim = self._ranks - 1

        def whole(number: int) -> list[dict[str, Any]]:
            return [said for said in heard[number] if said["world"] == self._ranks]

        while min(len(whole(number)) for number in range(self._ranks)) < steps:
            number, said = self._next()
            if "step" in said:
                heard[number].append(said)
        step_s = statistics.median(said["ended_s"] - said["began_s"] for said in whole(victim)[1:])
        time.sleep(step_s / 4)  # it now computes the next step
        killed_s = time.monotonic()
        os.killpg(self._processes[victim].pid, signal.SIGKILL)
        survivors = range(victim)
        after: dict[int, dict[str, Any]] = {}
        vain = dict.fromkeys(survivors, 0)
        while len(after) < len(survivors):
            number, said = self._next(but=victim)
            if "vain" in said and number not in after:
                vain[number] += 1
            elif "step" in said and (said["ended_s"] < killed_s or said["world"] == self._ranks):
                heard[number].append(said)
            elif "step" in said:
                after.setdefault(number, said)
        lost = max(heard[number][-1]["step"] + 1 - after[number]["step"] for number in survivors)
        return Loss(step_s, max(said["ended_s"] for said in after.values()) - killed_s, lost, max(vain.values()))

    def close(self) -> None:
        for process in self._processes.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for left in Path("/dev/shm").glob(f"deepspeed_*_127.0.0.1_{self._port}_*"):  # 69 MB a rank, which nobody else removes
            left.unlink()
        self._log.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextmanager
def group(engine: Engine, venvs: dict[str, Path], ranks: int, least: int) -> Iterator[Group]:
    with tempfile.TemporaryDirectory(prefix="shardnet-peers-") as logs:
        started = Group(engine, venvs[engine.peer], ranks, least, Path(logs))
        try:
            yield started
        finally:
            started.close()


def race(pair: tuple[Engine, Engine], venvs: dict[str, Path], rounds: int, steps: int) -> tuple[Figures, Figures]:
    """Let both engines of a pair step in turn, with two ranks each."""
    results = Figures(pair[0].name), Figures(pair[1].name)
    with ExitStack() as stack:
        groups = [stack.enter_context(group(engine, venvs, 2, 2)) for engine in pair]
        for each, figures in zip(groups, results, strict=True):
            each.turn(WARM_UP, figures, counts=False)
        for _ in range(rounds):
            for each, figures in zip(groups, results, strict=True):
                each.turn(steps, figures, counts=True)
        for each, figures in zip(groups, results, strict=True):
            each.watched_turn(WATCHED, figures)
    return results


def loss(engine: Engine, venvs: dict[str, Path]) -> Loss:
    """The loss of one of three ranks, after all of them have done four steps and begun the fifth."""
    with group(engine, venvs, 3, 2) as three:
        return three.lose_one(4)
