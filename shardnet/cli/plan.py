"""`shardnet plan`: says before a training is started what it will need under each strategy."""

import argparse
from typing import Any

from shardnet.cli import arguments
from shardnet.errors import UsageError

# Written out, so that --help need not wait for torch; tests/cli/test_plan.py compares them with the strategies that can be planned.
STRATEGIES = ("full_shard", "shard_grad_op", "hybrid_shard", "zero_1", "no_shard")
OPTIMIZERS = ("adamw", "sgd-momentum", "sgd")
DTYPES = ("float32", "float64", "bfloat16", "float16")
COMPRESSIONS: dict[str, dict[str, Any]] = {  # as workers/train_lm.py names them
    "none": {},
    "bfloat16": {"weights": "bfloat16"},
    "int8-weights": {"weights": "int8"},
    "int8-gradients": {"gradients": "int8"},
    "bfloat16-int8": {"weights": "bfloat16", "gradients": "int8"},
    "int8": {"weights": "int8", "gradients": "int8"},
}
RESIDUALS = ("bfloat16", "float32", "none")

DESCRIPTION = """\
Calculate what each rank holds and sends in a step, for each sharding strategy. Nothing is trained, sent or allocated: a
model is built without memory (on torch's meta device), or only its sizes are given.
"""
EPILOG = """\
examples:
  shardnet plan --parameters 7B --layers 32 --world 8
      a model of 32 equal layers
  shardnet plan --hidden 4096 --layers 32 --vocabulary 50257 --world 16 --node-size 8 --inside 20 --between 1.5
      a GPT on two nodes of 8; with the speed of the links, in GB/s, it says how long they are busy
  shardnet plan --parameters 7B --layers 32 --world 8 --compress int8
      with parameters and gradients sent in a quarter of the bytes
  shardnet plan --parameters 7B --layers 32 --world 16 --node-size 8 --reshard-after-forward 8
      backward gathers inside the node only, from shards that forward keeps there
  shardnet plan --parameters 7B --layers 32 --world 8 --cpu-offload
      with parameters, gradients and optimizer state in CPU memory: shows the CPU's share and the GPU's
  shardnet plan my_project.model:small --units Block --input 4x1024:int64 --world 4
      my_project/model.py has a function small() that returns a module; each Block is a unit. A forward on an
      input of that shape tells how much is kept for backward
"""


def add_to(commands: arguments.Commands) -> None:
    parser = commands.add_parser(
        "plan",
        help="what a training will need under each strategy",
        usage="shardnet plan (MODULE:CALLABLE | --parameters P --layers L | --hidden H --layers L --vocabulary V) [options]",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    model = parser.add_argument_group("the model")
    model.add_argument("model", nargs="?", metavar="MODULE:CALLABLE", help="called without arguments, it returns a torch module")
    model.add_argument(
        "--units", metavar="CLASS[,CLASS]", help="classes of modules that are sharded as units (default: the whole model is one unit)"
    )
    model.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="SHAPE[:DTYPE]",
        help="shape and dtype of one argument of forward on one rank, such as 4x1024:int64; repeat it for more (default dtype: float32)",
    )
    model.add_argument("--parameters", type=arguments.quantity, metavar="P", help="total number of parameters, such as 125M or 7e9")
    model.add_argument("--layers", type=arguments.positive, metavar="L", help="number of equal layers, each of which is a unit")
    model.add_argument(
        "--root-parameters",
        type=arguments.quantity,
        metavar="R",
        help="how many of the P parameters are outside the layers, such as embeddings (default: 0)",
    )
    model.add_argument("--hidden", type=arguments.positive, metavar="H", help="hidden size of a GPT")
    model.add_argument("--vocabulary", type=arguments.positive, metavar="V", help="vocabulary size of a GPT")
    ranks = parser.add_argument_group("ranks and links")
    ranks.add_argument("--world", type=arguments.positive, default=8, metavar="N", help="number of ranks (default: %(default)s)")
    ranks.add_argument("--node-size", type=arguments.positive, metavar="K", help="ranks per node (default: one node)")
    ranks.add_argument(
        "--inside", type=arguments.gigabytes_per_s, metavar="GB/S", help="bandwidth from a rank to the other ranks of its node"
    )
    ranks.add_argument("--between", type=arguments.gigabytes_per_s, metavar="GB/S", help="bandwidth from a whole node to the other nodes")
    how = parser.add_argument_group("training options")
    how.add_argument("--strategy", action="append", choices=STRATEGIES, help="plan only this strategy (repeatable; default: all)")
    how.add_argument("--dtype", choices=DTYPES, help="dtype in which parameters are stored (default: the model's own, or float32)")
    how.add_argument(
        "--compute-dtype", choices=DTYPES, help="dtype in which they are gathered and computed with (default: the one they are stored in)"
    )
    how.add_argument("--reduce-dtype", choices=DTYPES, help="dtype in which gradients are reduced (default: the one they are computed in)")
    how.add_argument(
        "--compress",
        choices=COMPRESSIONS,
        default="none",
        help="compress what FSDP sends: bfloat16 is for parameters only, int8 for parameters and gradients, bfloat16-int8 for "
        "parameters as bfloat16 and gradients as int8 (default: %(default)s)",
    )
    how.add_argument(
        "--block", type=arguments.positive, default=256, metavar="B", help="elements per scale of int8 compression (default: %(default)s)"
    )
    how.add_argument(
        "--residual",
        choices=RESIDUALS,
        default="bfloat16",
        help="dtype of the error feedback of compressed gradients, or none (default: %(default)s)",
    )
    how.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw", help="optimizer, whose state is counted (default: %(default)s)")
    how.add_argument(
        "--prefetch",
        type=arguments.whole,
        default=1,
        metavar="U",
        help="number of units gathered ahead of the one that computes (default: %(default)s)",
    )
    how.add_argument(
        "--reshard-after-forward",
        type=_resharding,
        metavar="K|true|false",
        help="what happens to gathered parameters between forward and backward: K keeps a shard of them on each of K neighbours, true "
        "frees them, false keeps them whole (default: as the strategy does)",
    )
    how.add_argument("--cpu-offload", action="store_true", help="keep shards and optimizer state in CPU memory, and gather units on a GPU")
    how.add_argument(
        "--elastic", action="store_true", help="include the copies that survive the loss of workers (shardnet run --min-workers)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, in bytes and seconds")
    parser.set_defaults(execute=execute)


def _resharding(text: str) -> bool | int:
    """FSDP's argument; FSDP itself checks which numbers make sense."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be true, false or a number of ranks, not {text!r}") from None


def execute(options: arguments.Arguments) -> int:
    """Raises UsageError for a model that cannot be planned and sizes that make no sense."""
    from shardnet.cli.plan_model import dtype_of, model_of
    from shardnet.cli.plan_table import as_json, as_text
    from shardnet.fsdp import Compression
    from shardnet.planning import OptimizerKind, Setting, Strategy, plan

    setting = Setting(
        options.world,
        node_size=options.node_size,
        compute_dtype=dtype_of(options.compute_dtype),
        reduce_dtype=dtype_of(options.reduce_dtype),
        optimizer=OptimizerKind(options.optimizer),
        prefetch=options.prefetch,
        compression=Compression(
            **COMPRESSIONS[options.compress],
            block=options.block,
            residual=dtype_of(None if options.residual == "none" else options.residual),
        ),
        reshard_after_forward=options.reshard_after_forward,
        cpu_offload=options.cpu_offload,
        elastic=options.elastic,
        inside_bytes_per_s=options.inside,
        between_bytes_per_s=options.between,
    )
    strategies = [Strategy(name) for name in options.strategy or ()]
    if Strategy.HYBRID_SHARD in strategies and options.node_size is None:
        raise UsageError("hybrid_shard needs --node-size, the number of ranks of each node")
    model = model_of(options)
    plans = plan(model, setting, strategies)
    print(as_json(model, setting, plans) if options.json else as_text(model, setting, plans))
    return 0
