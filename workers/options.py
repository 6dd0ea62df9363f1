"""The command line of train_lm.py."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from shardnet import ShardingStrategy
from shardnet.fsdp import Compression, MixedPrecision

STEPS = 600
MAX_SECONDS = 120.0  # without a given length a run ends in under three minutes, start and sample included, on any machine
PRECISIONS = {
    "float32": MixedPrecision(),
    "bfloat16": MixedPrecision(torch.bfloat16, torch.float32, output_dtype=torch.float32),
}
COMPRESSIONS = {
    "none": Compression(),
    "bfloat16": Compression(weights="bfloat16"),
    "int8-weights": Compression(weights="int8"),
    "int8-gradients": Compression(gradients="int8"),
    "bfloat16-int8": Compression(weights="bfloat16", gradients="int8"),
    "int8": Compression(weights="int8", gradients="int8"),
}
EXAMPLES = """\
examples:
  shardnet run --nproc 2 workers/train_lm.py -- --max-seconds 60
  shardnet run --nproc 3 --min-workers 2 --restarts 1 workers/train_lm.py
  shardnet run --nproc 4 workers/train_lm.py -- --text book.txt --epochs 3 --out runs/book
  python workers/train_lm.py --steps 50          alone, without a cluster
"""


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, checked. End the program with a message if they make no sense."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.steps is None and options.epochs is None:
        options.steps, options.max_seconds = STEPS, options.max_seconds or MAX_SECONDS
    if options.dim % (2 * options.heads):
        parser.error(f"--dim must be a multiple of twice --heads, got {options.dim} and {options.heads}")
    if options.compress != "none" and options.strategy == ShardingStrategy.NO_SHARD:
        parser.error(f"--compress {options.compress} cannot be used with --strategy {options.strategy}, which sends no shards")
    if COMPRESSIONS[options.compress].weights == options.precision == "bfloat16":
        parser.error(f"--precision bfloat16 gathers weights as bfloat16 already; leave --compress {options.compress} out")
    if options.device == "auto":
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch sees no GPU here (torch.cuda.is_available() is False); leave it out")
    if options.cpu_offload and options.device == "cpu":
        parser.error("--cpu-offload is for computing on a GPU, but --device is cpu, or PyTorch sees no GPU here; leave it out")
    for name in ("warmup", "decay"):
        if not 0 <= vars(options)[name] <= 1:
            parser.error(f"--{name} must be a share from 0 to 1, got {vars(options)[name]}")
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Train a byte-level GPT on text, sharded over the workers of a cluster.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_run(parser.add_argument_group("the run"))
    _add_model(parser.add_argument_group("the model"))
    _add_optimizer(parser.add_argument_group("the optimizer"))
    _add_output(parser.add_argument_group("what it tells"))
    return parser


def _add_run(group: argparse._ArgumentGroup) -> None:
    length = group.add_mutually_exclusive_group()
    length.add_argument(
        "--steps", type=_positive, metavar="N", help=f"optimizer steps (default: {STEPS}, and --max-seconds {MAX_SECONDS:.0f})"
    )
    length.add_argument("--epochs", type=_positive, metavar="N", help="passes over the text, instead of --steps")
    group.add_argument(
        "--max-seconds", type=float, metavar="S", help="end after this time even if steps are left; the learning rate decays in time for it"
    )
    group.add_argument(
        "--stop-file", type=Path, metavar="PATH", help="end early, but well, when this file is there, on whichever machine (default: none)"
    )
    group.add_argument(
        "--commit-every",
        type=_positive,
        default=1,
        metavar="N",
        help="steps from one commit to the next, where workers may be lost: each costs time, and so many are done again after a loss "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--checkpoints", type=Path, metavar="DIR", help="go on from the last checkpoint there, and write more (default: there are none)"
    )
    group.add_argument(
        "--save-every", type=_positive, default=100, metavar="N", help="steps from one checkpoint to the next (default: %(default)s)"
    )
    group.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="where to compute; auto is a GPU where there is one, shared if a machine has more workers than GPUs (default: %(default)s)",
    )
    group.add_argument(
        "--cpu-offload", action="store_true", help="compute on a GPU, but keep parameters and optimizer state in the CPU's memory"
    )
    group.add_argument("--batch", type=_positive, default=4, metavar="N", help="sequences of one worker in one step (default: %(default)s)")
    group.add_argument("--text", type=Path, metavar="PATH", help="file or folder to learn (default: Python's standard library)")
    group.add_argument(
        "--seed", type=int, default=1, metavar="N", help="of the parameters, the order and the sample (default: %(default)s)"
    )


def _add_model(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--context", type=_positive, default=128, metavar="N", help="bytes of one sequence (default: %(default)s)")
    group.add_argument("--dim", type=_positive, default=256, metavar="N", help="width of the residual stream (default: %(default)s)")
    group.add_argument(
        "--layers", type=_positive, default=4, metavar="N", help="blocks, each of them a unit of sharding (default: %(default)s)"
    )
    group.add_argument("--heads", type=_positive, default=4, metavar="N", help="attention heads (default: %(default)s)")
    group.add_argument(
        "--bigrams", type=_not_negative, default=128, metavar="N", help="width of byte-pair vectors, 0: none (default: %(default)s)"
    )
    group.add_argument(
        "--strategy",
        choices=[strategy.value for strategy in ShardingStrategy],
        default=ShardingStrategy.FULL_SHARD.value,
        help="what is sharded, and over which ranks (default: %(default)s)",
    )
    group.add_argument(
        "--precision",
        choices=PRECISIONS,
        default="float32",
        help="what is gathered and computed in; parameters, sums of gradients and the optimizer stay float32 (default: %(default)s)",
    )
    group.add_argument(
        "--compress",
        choices=COMPRESSIONS,
        default="none",
        help="what is sent in fewer bits than it is computed in; bfloat16: weights, int8: weights and gradients (default: %(default)s)",
    )
    group.add_argument("--prefetch", type=_not_negative, default=1, metavar="N", help="units gathered ahead of time (default: %(default)s)")


def _add_optimizer(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--lr", type=float, default=1e-3, metavar="RATE", help="highest learning rate (default: %(default)s)")
    group.add_argument(
        "--warmup", type=float, default=0.08, metavar="SHARE", help="share of the run until --lr is reached (default: %(default)s)"
    )
    group.add_argument(
        "--decay", type=float, default=0.02, metavar="SHARE", help="share of --lr left at the end, along a cosine (default: %(default)s)"
    )
    group.add_argument("--clip", type=float, default=1.0, metavar="NORM", help="longest gradient (default: %(default)s)")
    group.add_argument("--weight-decay", type=float, default=0.1, metavar="RATE", help="of AdamW (default: %(default)s)")


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--valid-every", type=_positive, default=50, metavar="N", help="steps between validations (default: %(default)s)")
    group.add_argument("--valid-windows", type=_positive, default=128, metavar="N", help="sequences of a validation (default: %(default)s)")
    group.add_argument("--prompt", default="def main(", metavar="TEXT", help="what the sample begins with (default: %(default)r)")
    group.add_argument(
        "--sample-bytes", type=_not_negative, default=500, metavar="N", help="length of the sample at the end (default: %(default)s)"
    )
    group.add_argument(
        "--out", type=Path, metavar="DIR", help="write report.html there, a page about the run, trace.json, its timeline, and metrics.jsonl"
    )


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def _not_negative(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"must not be negative, got {number}")
    return number
