"""Measure shardnet beside DeepSpeed, torchft and hivemind, and print Markdown: `python -m benchmarks.peers`."""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.machine import describe_machine
from benchmarks.peers.contest import ContestantFailed, Engine, Figures, Loss, loss, race
from benchmarks.peers.tables import losses_table, steps_table
from benchmarks.render import as_markdown

HERE = Path(__file__).parent
OURS, PEERS = "shardnet", ("deepspeed", "torchft", "hivemind")
ZERO_1, ZERO_2, ZERO_3 = (Engine(f"DeepSpeed ZeRO-{stage}", "deepspeed", (str(stage),)) for stage in (1, 2, 3))
TORCHFT, HIVEMIND = Engine("torchft DDP", "torchft"), Engine("hivemind GradientAverager", "hivemind")


def ours(*arguments: str) -> Engine:
    """Shardnet, run with these arguments of with_shardnet.py."""
    return Engine(" ".join(arguments).replace("grpc", "over gRPC"), OURS, arguments)


PAIRS = (
    (ours("SHARD_GRAD_OP"), ZERO_1),
    (ours("SHARD_GRAD_OP"), ZERO_2),
    (ours("FULL_SHARD"), ZERO_3),
    (ours("FULL_SHARD", "grpc"), ZERO_3),
    (ours("NO_SHARD"), TORCHFT),
    (ours("NO_SHARD", "elastic"), TORCHFT),
    (ours("NO_SHARD", "elastic", "grpc"), TORCHFT),
    (ours("NO_SHARD"), HIVEMIND),
    (ours("NO_SHARD", "grpc"), HIVEMIND),
)
MORTAL = (ours("FULL_SHARD", "elastic"), ours("NO_SHARD", "elastic"), TORCHFT, HIVEMIND)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venvs", type=Path, default=Path("build/peers"), help="one folder a peer; made if absent (default: %(default)s)")
    parser.add_argument("--peers", default=",".join(PEERS), help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each of a pair (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=2, help="of a turn (default: %(default)s)")
    parser.add_argument("--kills", type=int, default=2, help="of each engine that outlives them (default: %(default)s)")
    options = parser.parse_args()
    peers: list[str] = options.peers.split(",")
    try:
        venvs = {OURS: Path(sys.executable), **{peer: environment(peer, options.venvs) for peer in peers}}
    except subprocess.CalledProcessError as error:
        sys.exit(f"benchmarks.peers: {error}")
    failures = list[ContestantFailed]()
    print(describe_machine(), end="\n\n")
    if rows := races([pair for pair in PAIRS if pair[1].peer in peers], venvs, options, failures):
        print(as_markdown(steps_table(rows)), end="\n\n", flush=True)
    if deaths := kills([engine for engine in MORTAL if engine.peer in venvs], venvs, options.kills, failures):
        print(as_markdown(losses_table(deaths)))
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


def races(
    pairs: Sequence[tuple[Engine, Engine]], venvs: dict[str, Path], options: argparse.Namespace, failures: list[ContestantFailed]
) -> list[tuple[Figures, Figures]]:
    rows = []
    for pair in pairs:
        print(f"steps: {pair[0].name}, {pair[1].name}", file=sys.stderr)
        try:
            rows.append(race(pair, venvs, options.rounds, options.steps))
        except ContestantFailed as failure:
            failures.append(failure)
    return rows


def kills(engines: Sequence[Engine], venvs: dict[str, Path], repeats: int, failures: list[ContestantFailed]) -> dict[str, list[Loss]]:
    """Kill a rank of each engine, in turn, `repeats` times."""
    deaths: dict[str, list[Loss]] = {}
    for _ in range(repeats):
        for engine in engines:
            print(f"kill -9: {engine.name}", file=sys.stderr)
            try:
                deaths.setdefault(f"{OURS} {engine.name}" if engine.peer == OURS else engine.name, []).append(loss(engine, venvs))
            except ContestantFailed as failure:
                failures.append(failure)
    return {name: losses for name, losses in deaths.items() if losses}


def environment(peer: str, folder: Path) -> Path:
    """The Python of a peer's virtual environment. Its files are copies: memory of files that two environments share would count half."""
    python = (folder / peer / "bin" / "python").absolute()
    if not python.exists():
        uv = shutil.which("uv")
        make = [uv, "venv", "--quiet", "--python", sys.executable] if uv else [sys.executable, "-m", "venv"]
        install = [uv, "pip", "install", "--link-mode", "copy", "--python", str(python)] if uv else [str(python), "-m", "pip", "install"]
        subprocess.run([*make, str(folder / peer)], check=True)
        for step in (["-r", str(HERE / "torch.txt")], ["--no-build-isolation", "-r", str(HERE / f"{peer}.txt")]):
            path = f"{python.parent}:{os.environ['PATH']}"
            subprocess.run(
                [*install, "--quiet", *step], check=True, env={**os.environ, "PATH": path, "DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}
            )
    return python


if __name__ == "__main__":
    sys.exit(main())
