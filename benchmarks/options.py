"""The command line, and the sessions that it asks for."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar, cast

from benchmarks import growth
from benchmarks.plan import (
    Case,
    Collectives,
    Compressed,
    Interop,
    Memory,
    Op,
    Session,
    Topology,
    Training,
    Transport,
    default_repeats,
    default_steps,
)
from benchmarks.targets import COMPRESSED
from shardnet.cli.arguments import positive
from shardnet.config import KIB, MIB, Limits

T = TypeVar("T")

LATEST = Path(__file__).resolve().parent / "latest.json"
MEMORY_STEPS = 4  # peak memory is known after two
ELEMENT_BYTES = 4  # everything is measured in float32
_UNITS = {"": 1, "b": 1, "k": KIB, "kib": KIB, "m": MIB, "mib": MIB, "g": 1024 * MIB, "gib": 1024 * MIB}
DESCRIPTION = """\
Measure collectives against torch's gloo, training steps against FSDP2 over gloo and against no communication at all,
torch's own code over shardnet against the same over gloo, and how cost grows. Both sides run in the same processes, in turn. Prints
tables and writes all numbers as JSON; benchmarks/README.md says how to read them. Give it a machine that does nothing
else.
"""
EPILOG = """\
examples:
  python -m benchmarks                                        everything, for the record
  python -m benchmarks --quick                                whether it works, in a minute
  python -m benchmarks --only collectives --transports shm --ranks 4 --sizes 16MiB,64MiB --ops all_reduce
  python -m benchmarks --topologies netns,netns-1gbit         across nodes alone; as root, on Linux
  python -m benchmarks --markdown benchmarks/latest.json      the tables of an earlier run, as Markdown
  python -m benchmarks --only growth --json growth.json --results .     how cost grows, and plots of it
"""


class Part(StrEnum):
    COLLECTIVES = "collectives"
    STEP = "step"
    MEMORY = "memory"
    INTEROP = "interop"
    GROWTH = "growth"


@dataclass(frozen=True, slots=True)
class _Preset:
    """What is measured unless the command line says otherwise."""

    ranks: tuple[int, ...] = (2, 4)
    step_ranks: tuple[int, ...] = (2, 4)
    sizes: tuple[int, ...] = (KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB)
    repeats: int | None = None  # by size: default_repeats
    steps: int | None = None  # by topology: default_steps
    dim: int = 512
    layers: int = 8
    heads: int = 8
    context: int = 128
    bigrams: int = 128
    batch: int = 4
    explain: bool = True
    only: tuple[Part, ...] = tuple(Part)


FULL = _Preset()
QUICK = _Preset(
    ranks=(2,),
    step_ranks=(2,),
    sizes=(KIB, MIB),
    repeats=5,
    steps=3,
    dim=64,
    layers=2,
    heads=4,
    context=64,
    bigrams=16,
    batch=2,
    explain=False,
    only=(Part.COLLECTIVES, Part.STEP, Part.MEMORY, Part.INTEROP),
)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, checked; their `sessions` say what to measure. Exit with status 2 if the options make no sense."""
    parser = _parser()
    options = parser.parse_args(arguments)
    preset = QUICK if options.quick else FULL
    for name in _Preset.__dataclass_fields__:
        if getattr(options, name) is None:
            setattr(options, name, getattr(preset, name))
    options.sessions = list(_sessions(options))
    for session in options.sessions:
        for size in _sizes_of(session):
            if size % (ELEMENT_BYTES * session.ranks):
                parser.error(f"--sizes must be multiples of {ELEMENT_BYTES} bytes x ranks, got {size} for {session.ranks} ranks")
    if options.dim % (2 * options.heads):
        parser.error(f"--dim must be a multiple of twice --heads, got {options.dim} and {options.heads}")
    if options.results is not None and find_spec("matplotlib") is None:  # better said before measuring than after
        parser.error("--results draws plots and needs matplotlib, which is missing; pip install 'shardnet[bench]'")
    try:
        Limits(chunk_bytes=options.chunk)
    except ValueError as error:
        parser.error(f"--chunk: {error}")
    return options


def _sizes_of(session: Session) -> Sequence[int]:
    match session:
        case Collectives():
            return [case.bytes for case in session.cases]
        case Interop():
            return session.sizes
        case _:
            return ()


def _sessions(options: argparse.Namespace) -> Iterator[Session]:
    if Part.COLLECTIVES in options.only:
        for ranks, topology, transport in _places(options, options.ranks):
            cases = tuple(
                Case(op, size, options.repeats or default_repeats(size, topology))
                for op in options.ops
                if op in topology.ops(transport)
                for size in options.sizes
            )
            yield Collectives(ranks, topology, transport, options.chunk, cases, options.explain)
    model = {name: getattr(options, name) for name in ("dim", "layers", "heads", "context", "bigrams", "batch")}
    if Part.STEP in options.only:
        for ranks, topology, transport in _places(options, options.step_ranks):
            if transport is Transport.MTLS:
                continue
            compressions = options.compress if topology.rate else ()  # only where links are limited
            yield Training(
                *(ranks, topology, transport, options.chunk), options.steps or default_steps(topology), **model, compressions=compressions
            )
    if Part.MEMORY in options.only and Path("/proc/self/smaps_rollup").exists():
        for ranks, topology, transport in _places(options, options.step_ranks):
            if (topology, transport) == (Topology.ONE_NODE, Transport.SHM):
                yield Memory(ranks, topology, transport, options.chunk, options.steps or MEMORY_STEPS, **model)
    if Part.INTEROP in options.only:
        yield from _interop(options, model)
    if Part.GROWTH in options.only and any(tuple(place) == growth.PLACE for _, *place in _places(options, options.ranks)):
        yield from growth.sessions(options.chunk)


def _interop(options: argparse.Namespace, model: dict[str, Any]) -> Iterator[Session]:
    for ranks, topology, transport in _places(options, options.step_ranks):
        if (topology, transport) == (Topology.ONE_NODE, Transport.SHM):
            steps = options.steps or default_steps(topology)
            yield Interop(ranks, topology, transport, options.chunk, steps, **model, sizes=options.sizes, repeats=options.repeats)


def _places(options: argparse.Namespace, choice: Sequence[int]) -> Iterator[tuple[int, Topology, Transport]]:
    """Numbers of ranks, where they are and how they talk. `choice` applies where the topology does not fix the number."""
    for topology in options.topologies or Topology:
        for ranks in choice if topology.ranks is None else (topology.ranks,):
            for transport in topology.transports:
                if transport in options.transports:
                    yield ranks, topology, transport


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        type=_list_of(Part),
        metavar="PART,...",
        help="leave out the others: collectives, step (a training step), memory (of one), interop (torch's own code over both), growth "
        "(how cost grows with 2 to 16 ranks, size, collectives at once and depth of the model, on one machine; not with --quick)",
    )
    parser.add_argument(
        "--results",
        type=Path,
        metavar="DIR",
        help="write the tables, as Markdown, and plots of growth there, too, of this run or of the file of --markdown; needs matplotlib",
    )
    parser.add_argument("--quick", action="store_true", help="small, few and short: to see that it works, not for the record")
    parser.add_argument("--chunk", type=_size, default=Limits().chunk_bytes, metavar="SIZE", help="shardnet's chunk (default: 2MiB)")
    parser.add_argument("--json", type=Path, default=LATEST, metavar="PATH", help="where the numbers go (default: %(default)s)")
    parser.add_argument(
        "--markdown", type=Path, nargs="?", const=LATEST, metavar="PATH", help="measure nothing; print a JSON file's tables as Markdown"
    )
    parser.add_argument(
        "--transports",
        type=_list_of(Transport),
        default=tuple(Transport),
        metavar="NAME,...",
        help="what carries shardnet's data: grpc (each rank is a node), grpc-mtls (the same under TLS; collectives only), shm (all ranks "
        "are one node and share memory), hier (nodes of several ranks: both); default: whatever each topology has",
    )
    parser.add_argument(
        "--topologies",
        type=_list_of(Topology),
        metavar="NAME,...",
        help="where the ranks are: one-node, netns (each in a network namespace of its own, as fast as the kernel is), netns-1gbit (two "
        "namespaces of two ranks, links of 1 Gbit/s); default: all that this machine can make",
    )
    parser.add_argument(
        "--explain",
        action=argparse.BooleanOptionalAction,
        help="of each collective, say where shardnet's time went: waiting for peers, copying, reducing, in the kernel, in Python, waiting "
        "for data; takes some more runs of it (default: yes, with --quick no)",
    )
    _add_collectives(parser.add_argument_group("collectives"))
    _add_training(parser.add_argument_group("training step"))
    return parser


def _add_collectives(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--ranks", type=_list_of(_ranks), metavar="N,...", help="numbers of processes (default: 2,4; netns-1gbit has 4)")
    group.add_argument(
        "--sizes", type=_list_of(_size), metavar="SIZE,...", help="of the full tensor on a rank (default: 1KiB,64KiB,1MiB,16MiB,64MiB)"
    )
    group.add_argument("--ops", type=_list_of(Op), default=tuple(Op), metavar="OP,...", help=f"default: {','.join(Op)}")
    group.add_argument(
        "--repeats", type=positive, metavar="N", help="runs of each engine (default: 60 for small sizes to 9 for large ones)"
    )


def _add_training(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--step-ranks", type=_list_of(_ranks), metavar="N,...", help="numbers of processes (default: 2,4; netns-1gbit has 4)"
    )
    group.add_argument(
        "--steps", type=positive, metavar="N", help="timed steps of each engine (default: 10, across nodes 8, at 1 Gbit/s 6)"
    )
    group.add_argument("--dim", type=positive, metavar="N", help="width of the model (default: 512)")
    group.add_argument("--layers", type=positive, metavar="N", help="blocks, each of them a unit of sharding (default: 8)")
    group.add_argument("--heads", type=positive, metavar="N", help="attention heads (default: 8)")
    group.add_argument("--context", type=positive, metavar="N", help="bytes of one sequence (default: 128)")
    group.add_argument("--bigrams", type=positive, metavar="N", help="width of byte-pair vectors (default: 128)")
    group.add_argument("--batch", type=positive, metavar="N", help="sequences of one rank in one step (default: 4)")
    group.add_argument(
        "--compress",
        type=_compressions,
        default="int8,bfloat16",
        metavar="LIST",
        help="what weights are sent as, and gradients as int8, in more trainings where links are limited, or none (default: %(default)s)",
    )


def _compressions(text: str) -> tuple[Compressed, ...]:
    names = () if text == "none" else tuple(item.strip() for item in text.split(","))
    if unknown := [name for name in names if name not in COMPRESSED]:
        raise argparse.ArgumentTypeError(f"must be a list of {', '.join(COMPRESSED)}, or none, got {unknown[0]!r}")
    return cast(tuple[Compressed, ...], names)


def _list_of(parse: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    def parse_list(text: str) -> tuple[T, ...]:
        return tuple(parse(item.strip()) for item in text.split(","))

    parse_list.__name__ = "list"  # argparse then reports "invalid list value" for text that it cannot parse
    return parse_list


def _size(text: str) -> int:
    """`1024`, `64KiB`, `16M`."""
    digits = text.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    unit = text[len(digits) :].lower()
    if unit not in _UNITS or not digits.isdecimal() or not int(digits):
        raise argparse.ArgumentTypeError(f"a size must be a number followed by KiB or MiB, got {text!r}")
    return int(digits) * _UNITS[unit]


def _ranks(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"at least 2 ranks are needed to communicate, got {text!r}")
    return int(text)
