"""`shardnet plan`: its output, and its errors about models that cannot be planned."""

import json
from pathlib import Path

import pytest
import torch

from options import COMPRESSIONS
from shardnet.cli import plan as command
from shardnet.cli.main import main
from shardnet.fsdp import Compression
from shardnet.planning import OptimizerKind, Strategy

PROGRAM = """
import torch
from torch import nn


class Layer(nn.Linear):
    pass


def small():
    return nn.Sequential(nn.Embedding(10, 8), Layer(8, 8), nn.ReLU(), Layer(8, 8))


def broken():
    raise KeyError("no such size")


def needy(width):
    return nn.Linear(width, width)


number, empty = 7, lambda: nn.ReLU()
text = str
"""


@pytest.fixture(autouse=True)
def _in_a_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "planned_models.py").write_text(PROGRAM)
    (tmp_path / "planned_badly.py").write_text("import no_such_package")
    (tmp_path / "planned_worse.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def test_the_words_on_the_command_line_are_those_that_can_be_planned() -> None:
    assert list(Strategy) == list(command.STRATEGIES)
    assert list(OptimizerKind) == list(command.OPTIMIZERS)
    assert all(isinstance(getattr(torch, name), torch.dtype) for name in command.DTYPES)


def test_a_model_by_its_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--parameters", "7B", "--layers", "32", "--world", "8"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0] == "sizes: 7,000,000,000 parameters in float32; 32 units, the largest of 218,750,000"
    assert lines[1] == "8 ranks; adamw, prefetch 1"
    head, *rows = (line.split("  ") for line in lines[3:8])
    assert head[0] == "strategy"
    assert [row[0] for row in rows] == ["FULL_SHARD (ZeRO-3)", "SHARD_GRAD_OP (ZeRO-2)", "ZeroOptimizer (ZeRO-1)", "NO_SHARD (DDP)"]
    assert " ".join(lines[4].split()[2:]) == "3.3 GiB 3.3 GiB 6.5 GiB 1.6 GiB 2.4 GiB - 17.1 GiB 67.7 GiB -"
    assert "Not counted: activations" in out
    assert "No times, since the links' speeds are not given" in out


def test_a_model_from_a_program_with_everything_known(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["planned_models:small", "--units", "Layer", "--input", "2x3:int64", "--world", "4", "--node-size", "2"]
    assert main(["plan", *given, "--inside", "2", "--between", "0.5", "--optimizer", "sgd", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["parameters"], found["units"], found["world_size"], found["node_size"]) == (80 + 2 * 72, 3, 4, 2)
    assert [each["strategy"] for each in found["plans"]] == list(Strategy)
    full = found["plans"][0]
    # what the embedding gives to the first layer, and the result of ReLU, each [2, 3, 8], and the tokens
    activations = 2 * 4 * 2 * 3 * 8 + 8 * 2 * 3
    assert full["memory"] == {
        "parameters": 4 * (80 + 72 + 72) // 4,
        "gradients": 4 * (80 + 72 + 72) // 4,
        "optimizer": 0,
        "gathered": 4 * (80 + 72 + 72),
        "reducing": 4 * (80 + 72 + 72),
        "secondary": 0,
        "residuals": 0,
        "packed": 0,
        "copies": 0,
        "activations": activations,
        "total": 2 * 224 + 2 * 896 + activations,
        "on_cpu": None,
        "on_gpu": None,
    }
    assert full["bytes_sent"] == 3 * (224 + 72 + 224)
    # half of what is gathered and reduced crosses the link
    assert full["communication_s"] == pytest.approx(4 * (224 + 72 + 224) / 2 / 0.5e9)
    assert [each["op"] for each in full["traffic"]] == ["all_gather", "all_gather", "reduce_scatter"]


def test_a_chosen_strategy_in_mixed_precision(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["planned_models:small", "--strategy", "full_shard", "--strategy", "zero_1", "--compute-dtype", "bfloat16", "--world", "2"]
    assert main(["plan", *given, "--inside", "1"]) == 0
    out = capsys.readouterr().out
    assert "224 parameters in float32, gathered as bfloat16; one unit" in out
    assert "NO_SHARD" not in out
    assert "ZeRO-1 is planned in the dtype that parameters are kept in" in out
    assert "Everything is gathered at once, since the model is one unit" in out
    assert "Times are those of the links alone" in out


def test_little_gradients_are_said_to_be_sent_more_often(capsys: pytest.CaptureFixture[str]) -> None:
    """What a run of four ranks sends was counted for units of 512 KiB: four times the plan to reduce, twice to all-reduce."""
    given = ["plan", "--parameters", "2M", "--layers", "8", "--world", "4"]
    assert main([*given, "--reduce-dtype", "bfloat16"]) == 0
    whole = "Where no GPU computes, a unit's gradients of up to 1.0 MiB go whole to every rank of the node: up to 4 times"
    assert f"{whole} the bytes that are planned here to reduce them, with FULL_SHARD (ZeRO-3), " in capsys.readouterr().out
    assert main([*given, "--cpu-offload", "--strategy", "full_shard"]) == 0
    assert main(["plan", "--parameters", "2G", "--layers", "8", "--world", "4"]) == 0
    assert "go whole" not in capsys.readouterr().out


def test_compression_by_the_names_of_the_training_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert {name: Compression(**given) for name, given in command.COMPRESSIONS.items()} == COMPRESSIONS
    given = ["planned_models:small", "--world", "2", "--compress", "int8", "--block", "16", "--residual"]
    assert main(["plan", *given, "none", "--strategy", "full_shard", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["compression"] == {"weights": "int8", "gradients": "int8"}
    (full,) = found["plans"]
    shard = 112 + 4 * 7  # a byte each, and a scale for each 16
    assert [(each["op"], each["bytes_sent"]) for each in full["traffic"]] == [("all_gather", shard), ("all_to_all", shard)]
    assert (full["memory"]["residuals"], full["memory"]["packed"]) == (0, 2 * shard)

    assert main(["plan", *given, "float32", "--node-size", "1"]) == 0
    out = capsys.readouterr().out
    assert "; sent compressed: weights as int8, gradients as int8\n" in out
    assert "reducing  residuals" in out
    assert "Compressed gradients are exchanged directly" not in out
    assert "ZeRO-1 and NO_SHARD are planned without compression" in out


@pytest.mark.parametrize(
    ("more", "note"),
    [
        ([], "Nodes add up gradients before they compress them."),
        (["--cpu-offload"], "Compressed gradients are exchanged directly instead of in a ring; this sends more between nodes"),
    ],
)
def test_where_gradients_are_added_up_before_they_are_compressed(more: list[str], note: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["planned_models:small", "--world", "4", "--node-size", "2", "--compress", "int8", "--strategy", "full_shard"]
    assert main(["plan", *given, *more]) == 0
    assert note in capsys.readouterr().out


def test_what_is_kept_between_forward_and_backward(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["planned_models:small", "--units", "Layer", "--world", "4", "--node-size", "2", "--prefetch", "0", "--reshard-after-forward"]
    assert main(["plan", *given, "2", "--json"]) == 0
    kept = {
        each["strategy"]: (each["reshard_after_forward"], each["memory"]["secondary"])
        for each in json.loads(capsys.readouterr().out)["plans"]
    }
    assert kept.pop("full_shard") == (2, 4 * (72 + 72) // 2)  # of both layers; the root is held
    assert set(kept.values()) == {(None, 0)}

    assert main(["plan", *given, "2"]) == 0
    out = capsys.readouterr().out
    assert "; adamw, prefetch 0, reshard_after_forward=2\n" in out
    assert "reducing  secondary  activations" in out
    assert "gather from neighbours" in out
    assert "Planned without reshard_after_forward=2, which does not suit SHARD_GRAD_OP (ZeRO-2), HYBRID_SHARD, " in out

    assert main(["plan", *given, "False", "--strategy", "full_shard", "--strategy", "shard_grad_op", "--json"]) == 0
    full, grad = json.loads(capsys.readouterr().out)["plans"]
    assert {**full, "strategy": None} == {**grad, "strategy": None}


def test_offload_says_what_is_where(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["planned_models:small", "--units", "Layer", "--world", "2", "--cpu-offload"]
    assert main(["plan", *given, "--json"]) == 0
    found = {each["strategy"]: each for each in json.loads(capsys.readouterr().out)["plans"]}
    assert {name for name, each in found.items() if each["cpu_offload"]} == {"full_shard", "shard_grad_op", "no_shard"}
    full = found["full_shard"]["memory"]
    assert full["on_cpu"] == full["parameters"] + full["gradients"] + full["optimizer"]
    assert full["on_gpu"] == full["gathered"] + full["reducing"] == full["total"] - full["on_cpu"]
    assert (found["zero_1"]["memory"]["on_cpu"], found["zero_1"]["memory"]["on_gpu"]) == (0, found["zero_1"]["memory"]["total"])

    assert main(["plan", *given]) == 0
    out = capsys.readouterr().out
    assert "; adamw, prefetch 1, cpu_offload\n" in out
    assert "activations  on the CPU  on the GPU  sends a step" in out
    assert "With cpu_offload, parameters, gradients and the optimizer's state are on the CPU" in out
    assert "ZeRO-1 is planned without cpu_offload" in out

    assert main(["plan", *given, "--strategy", "full_shard"]) == 0
    assert "ZeRO-1" not in capsys.readouterr().out


def test_16_bit_gradients_between_nodes_are_remarked_on(capsys: pytest.CaptureFixture[str]) -> None:
    """Where each rank is a node, 16-bit gradients travel as they are."""
    for node_size, is_told in (("4", True), ("1", False)):
        assert main(["plan", "--parameters", "1M", "--layers", "4", "--node-size", node_size, "--dtype", "bfloat16"]) == 0
        assert ("Nodes send each other sums of 16-bit gradients as float32" in capsys.readouterr().out) == is_told


def test_a_rank_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--hidden", "64", "--layers", "2", "--vocabulary", "100", "--world", "1"]) == 0
    assert "\n1 rank; adamw" in (out := capsys.readouterr().out)
    assert "a rank alone sends nothing" in out


SIZES = ["--parameters", "1M", "--layers", "4"]


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ([], "name a model as MODULE:CALLABLE, or give its sizes: --parameters and --layers, or --hidden, --layers and --vocabulary\n"),
        (["--parameters", "1M"], "name a model as MODULE:CALLABLE, or give its sizes"),
        (["--hidden", "8", "--layers", "2"], "name a model as MODULE:CALLABLE, or give its sizes"),
        ([*SIZES, "--hidden", "8"], "name a model as MODULE:CALLABLE, or give its sizes"),
        ([*SIZES, "--units", "Layer"], "--units is for a model given as MODULE:CALLABLE"),
        ([*SIZES, "--input", "2x3"], "--input is for a model given as MODULE:CALLABLE"),
        ([*SIZES, "--root-parameters", "1M"], "the root unit must have at least 0 parameters and fewer than all 1,000,000, got 1,000,000"),
        ([*SIZES, "--node-size", "3"], "nodes of 3 ranks do not make a world of 8: the node size must divide the world size"),
        ([*SIZES, "--strategy", "hybrid_shard"], "hybrid_shard needs --node-size, the number of ranks of each node"),
        (
            [*SIZES, "--dtype", "bfloat16", "--compute-dtype", "float32"],
            "parameters kept in torch.bfloat16 cannot be gathered as torch.float32",
        ),
        (["--parameters", "1.5", "--layers", "4"], "argument --parameters: must be a whole number from 1 on, such as 125M, not '1.5'"),
        (["--parameters", "many", "--layers", "4"], "argument --parameters: must be a whole number from 1 on"),
        ([*SIZES, "--inside", "0"], "argument --inside: must be a speed in GB/s, not '0'"),
        ([*SIZES, "--compress", "int4"], "argument --compress: invalid choice: 'int4'"),
        ([*SIZES, "--compress", "int8", "--block", "8"], "Compression: block must be a number of at least 16 elements, got 8"),
        (
            [*SIZES, "--compress", "bfloat16", "--compute-dtype", "bfloat16"],
            "Compression: weights are gathered as torch.bfloat16 already, by MixedPrecision",
        ),
        ([*SIZES, "--reshard-after-forward", "3"], "reshard_after_forward=3: a number must divide the 8 ranks that share the parameters"),
        ([*SIZES, "--reshard-after-forward", "8"], "reshard_after_forward=8: a number must divide the 8 ranks that share the parameters"),
        (
            [*SIZES, "--reshard-after-forward", "true", "--strategy", "shard_grad_op"],
            "reshard_after_forward=True: SHARD_GRAD_OP keeps parameters until backward; choose FULL_SHARD instead",
        ),
        (
            [*SIZES, "--reshard-after-forward", "4", "--strategy", "full_shard", "--strategy", "no_shard"],
            "reshard_after_forward=4: with NO_SHARD there is nothing to reshard; leave it out",
        ),
        (
            [*SIZES, "--reshard-after-forward", "4", "--strategy", "zero_1"],
            "reshard_after_forward=4: with ZeRO-1 the module is whole on every rank; leave it out",
        ),
        (
            [*SIZES, "--reshard-after-forward", "half"],
            "argument --reshard-after-forward: must be true, false or a number of ranks, not 'half'",
        ),
        ([*SIZES, "--cpu-offload", "--strategy", "zero_1"], "cpu_offload: with ZeRO-1 the module is whole on every rank; choose"),
        ([*SIZES, "--prefetch", "-1"], "argument --prefetch: must be a whole number from 0 on"),
        ([*SIZES, "--strategy", "fsdp"], "argument --strategy: invalid choice: 'fsdp'"),
        (["planned_models:small", "--layers", "4"], "planned_models:small has sizes of its own; leave out --layers"),
        (["planned_models"], "'planned_models' does not say what to call: write MODULE:CALLABLE"),
        (["no_such_module:small"], "there is no module 'no_such_module', neither in "),
        (["planned_badly:small"], "importing planned_badly failed: No module named 'no_such_package'"),
        (["planned_worse:small"], "importing planned_worse failed: ZeroDivisionError: division by zero"),
        (["planned_models:tiny"], "planned_models was imported, but 'tiny' is not in it"),
        (["planned_models:number"], "planned_models was imported, but 'number' is int, which cannot be called"),
        (
            ["planned_models:broken"],
            "planned_models:broken() failed, called without arguments on the meta device: KeyError: 'no such size'",
        ),
        (
            ["planned_models:needy"],
            "planned_models:needy() failed, called without arguments on the meta device: TypeError: needy() missing",
        ),
        (["planned_models:text"], "planned_models:text() returned str, not a torch.nn.Module"),
        (["planned_models:empty"], "planned_models:empty has no parameters: there is nothing to plan"),
        (
            ["planned_models:small", "--units", "Block"],
            "--units: the model has no Block; its modules are Embedding, Layer, ReLU, Sequential",
        ),
        (["planned_models:small", "--input", "2x3:int65"], "--input must be a shape and dtype such as 4x1024:int64, got '2x3:int65'"),
        (["planned_models:small", "--input", "2,3"], "--input must be a shape and dtype such as 4x1024:int64, got '2,3'"),
        (["planned_models:small", "--input", "2x3"], "forward failed on input [2, 3] float32: RuntimeError: "),
    ],
)
def test_what_cannot_be_planned_is_told_in_one_line(given: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(["plan", *given])
    except SystemExit as exit_:
        status = exit_.code  # type: ignore[assignment]  # argparse exits with a number
    out, err = capsys.readouterr()
    assert err.startswith(f"shardnet plan: {complaint}")
    assert (status, out, err.count("\n")) == (2, "", 1)
