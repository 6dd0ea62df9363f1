"""Plans of models whose figures can be worked out by hand."""

from dataclasses import replace

import pytest
import torch

from shardnet.errors import UsageError
from shardnet.fsdp import Compression
from shardnet.planning import GroupSize, ModelSize, OptimizerKind, Setting, Strategy, UnitSize, plan
from shardnet.planning.plan import Plan
from shardnet.planning.traffic import Traffic

FULL, GRAD, HYBRID, ZERO_1, NONE = Strategy
LAYERS = ModelSize.of_sizes(1000 + 400, 10, root=400)  # a root of 400 and ten layers of 100, float32


def one(strategy: Strategy, setting: Setting, model: ModelSize = LAYERS) -> Plan:
    (planned,) = plan(model, setting, [strategy])
    return planned


@pytest.mark.parametrize(
    ("strategy", "held"),  # parameters, gradients, optimizer state, gathered, reducing
    [
        (FULL, (1400, 1400, 2800, 4 * 600, 4 * 700)),
        (GRAD, (1400, 1400, 2800, 4 * 1400, 4 * 700)),
        (HYBRID, (2800, 2800, 5600, 4 * 600, 4 * 700)),
        (ZERO_1, (5600, 5600 + 1400, 2800, 0, 4 * 500)),
        (NONE, (5600, 5600, 11200, 0, 4 * 700)),
    ],
)
def test_memory_of_a_rank(strategy: Strategy, held: tuple[int, ...]) -> None:
    memory = one(strategy, Setting(4, node_size=2)).memory
    counters = 4 * 11  # AdamW's step of each tensor
    assert (memory.parameters, memory.gradients, memory.optimizer - counters, memory.gathered, memory.reducing) == held
    assert (memory.activations, memory.total) == (None, sum(held) + counters)


@pytest.mark.parametrize(
    ("strategy", "sent"),
    [
        (FULL, [("all_gather", 11, 4200), ("all_gather", 9, 2700), ("reduce_scatter", 11, 4200)]),
        (GRAD, [("all_gather", 11, 4200), ("reduce_scatter", 11, 4200)]),
        (HYBRID, [("all_gather", 11, 2800), ("all_gather", 9, 1800), ("reduce_scatter", 11, 2800), ("all_reduce", 11, 2800)]),
        (ZERO_1, [("reduce_scatter", 11, 4200), ("all_gather", 11, 4200)]),
        (NONE, [("all_reduce", 11, 8400)]),
    ],
)
def test_traffic_of_a_rank(strategy: Strategy, sent: list[tuple[str, int, int]]) -> None:
    planned = one(strategy, Setting(4, node_size=2))
    assert [(each.op, each.count, each.bytes_sent) for each in planned.traffic] == sent
    assert planned.bytes_sent == sum(count for _, _, count in sent)


@pytest.mark.parametrize(
    ("strategy", "setting", "whole"),
    [
        (FULL, Setting(4), True),
        (FULL, Setting(4, cpu_offload=True), False),
        (FULL, Setting(4, node_size=2), False),
        (HYBRID, Setting(4, node_size=2), True),
        (NONE, Setting(4), True),
        (NONE, Setting(2), False),
        (ZERO_1, Setting(2), True),
        (FULL, Setting(4, compression=Compression(gradients="int8")), False),
        (FULL, Setting(4, node_size=2, compression=Compression(gradients="int8")), True),
        (FULL, Setting(1), False),
    ],
)
def test_who_sends_little_gradients_whole(strategy: Strategy, setting: Setting, whole: bool) -> None:
    """Those that sum up a unit's gradients among ranks of one node, and send less otherwise."""
    assert one(strategy, setting).sends_whole == whole
    large = ModelSize.of_sizes(1 << 20, 1)
    assert not one(strategy, setting, large).sends_whole


def test_a_world_of_one_sends_nothing() -> None:
    for strategy in Strategy:
        planned = one(strategy, Setting(1))
        assert (planned.traffic, planned.communication_s) == ((), 0)


def test_zero_1_over_four_ranks_holds_a_quarter_of_adams_state() -> None:
    quarter, whole = (one(strategy, Setting(4)).memory.optimizer - 4 * 11 for strategy in (ZERO_1, NONE))
    assert quarter * 4 == whole


@pytest.mark.parametrize(("kind", "bytes_each"), [(OptimizerKind.ADAMW, 8), (OptimizerKind.SGD_MOMENTUM, 4), (OptimizerKind.SGD, 0)])
def test_optimizer_state(kind: OptimizerKind, bytes_each: int) -> None:
    counters = kind.counter_bytes * 11
    assert one(NONE, Setting(4, optimizer=kind)).memory.optimizer == 1400 * bytes_each + counters


def test_what_is_frozen_has_no_gradients_and_no_state() -> None:
    frozen = ModelSize("lora", (UnitSize("", (GroupSize(1000, torch.bfloat16, trainable=False), GroupSize(8, torch.float32))),))
    planned = one(FULL, Setting(4), frozen)
    assert (planned.memory.parameters, planned.memory.gradients, planned.memory.reducing) == (500 + 8, 8, 32)
    assert planned.memory.optimizer == 2 * 8 + 4
    assert [(each.op, each.bytes_sent) for each in planned.traffic] == [("all_gather", 1524), ("reduce_scatter", 24)]


def test_units_around_a_unit_are_in_flight_with_it() -> None:
    sizes = {"": 1000, "a": 100, "a.b": 10, "c": 1}
    nested = ModelSize("nested", tuple(UnitSize(name, (GroupSize(numel, torch.float32),)) for name, numel in sizes.items()))
    assert one(FULL, Setting(2, prefetch=0), nested).memory.gathered == 4 * 1110
    assert one(FULL, Setting(2, prefetch=1), nested).memory.gathered == 4 * 1111


def test_mixed_precision_gathers_narrow_and_keeps_wide() -> None:
    setting = Setting(4, compute_dtype=torch.bfloat16)
    memory = one(FULL, setting).memory
    assert (memory.parameters, memory.gradients, memory.gathered, memory.reducing) == (1400, 1400, 2 * 600, 2 * 700)
    assert one(FULL, setting).bytes_sent == (4200 + 2700 + 4200) // 2
    assert one(NONE, setting).memory.gathered == 2 * 1400  # nothing to gather, but there is a copy in bfloat16
    assert one(ZERO_1, setting).bytes_sent == one(ZERO_1, Setting(4)).bytes_sent
    wide = Setting(4, compute_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    assert one(FULL, wide).bytes_sent == (4200 + 2700) // 2 + 4200


def test_compression_packs_what_shards_send() -> None:
    """Blocks of 16: each shard of 25 has 2 scales, and each shard of 100 has 7."""
    setting = Setting(4, compression=Compression("int8", "int8", block=16), inside_bytes_per_s=100.0)
    planned = one(FULL, setting)
    layer, root = 4 * (25 + 4 * 2), 4 * (100 + 4 * 7)
    whole, again = 10 * layer + root, 9 * layer
    sent = [("all_gather", 11, whole * 3 // 4), ("all_gather", 9, again * 3 // 4), ("all_to_all", 11, whole * 3 // 4)]
    assert [(each.op, each.count, each.bytes_sent) for each in planned.traffic] == sent
    assert [each.seconds for each in planned.traffic] == [count / 100 for _, _, count in sent]
    assert (planned.memory.gathered, planned.memory.reducing) == (4 * 600, 4 * 500)  # gradients of a unit and the root
    assert planned.memory.residuals == 2 * 1400
    assert planned.memory.packed == root + 2 * layer  # gradients of the last three units
    without = one(FULL, Setting(4)).memory
    assert planned.memory.total - without.total == planned.memory.residuals + planned.memory.packed - 4 * 200


def test_averages_over_nodes_and_strategies_without_shards_are_not_compressed() -> None:
    setting = Setting(4, node_size=2, compression=Compression("bfloat16", "int8", residual=None), prefetch=0)
    plain = Setting(4, node_size=2)
    for strategy in (ZERO_1, NONE):
        assert one(strategy, setting).traffic == one(strategy, plain).traffic
        assert one(strategy, setting).memory.packed == 0
    hybrid = one(HYBRID, setting)
    assert [each.op for each in hybrid.traffic] == ["all_gather", "all_gather", "all_to_all", "all_reduce"]
    assert hybrid.traffic[0].bytes_sent == 1400  # half of two bytes each
    assert hybrid.traffic[3] == one(HYBRID, plain).traffic[3]
    assert hybrid.memory.residuals == 0


def test_packed_gradients_leave_a_node_as_one_sum_and_from_gpus_once_for_each_rank() -> None:
    compression = Compression(gradients="int8", block=100)
    setting = Setting(4, node_size=2, compression=compression, inside_bytes_per_s=10.0, between_bytes_per_s=10.0)
    packed = 1400 + 4 * 11 * 4  # a scale for each shard
    on_cpu, on_gpu = one(GRAD, setting), one(GRAD, replace(setting, cpu_offload=True))
    assert [(each.op, each.bytes_sent, each.seconds) for each in on_cpu.traffic[1:]] == [
        ("reduce_scatter", 4 * 1400 // 2, 4 * 1400 / 2 / 10),
        ("all_to_all", packed // 4, packed / 2 / 10),  # half of the half that belongs to its place: the part that goes to the other node
    ]
    assert [(each.op, each.bytes_sent, each.seconds) for each in on_gpu.traffic[1:]] == [
        ("all_to_all", packed * 3 // 4, packed / 10)  # each of a node's two ranks sends half of it to the two ranks of the other node
    ]
    assert (on_cpu.memory.residuals, on_gpu.memory.residuals) == (2 * 700, 2 * 1400)
    assert on_cpu.memory.packed * 2 == on_gpu.memory.packed


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (Setting(2, compute_dtype=torch.bfloat16, compression=Compression(weights="bfloat16")), "gathered as torch.bfloat16 already"),
        (Setting(2, reduce_dtype=torch.bfloat16, compression=Compression(gradients="int8")), "added up in float32"),
    ],
)
def test_compression_that_fsdp_refuses_is_not_planned(setting: Setting, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan(LAYERS, setting)


def test_parameters_are_not_gathered_wider_than_they_are() -> None:
    narrow = ModelSize.of_sizes(100, 1, dtype=torch.bfloat16)
    with pytest.raises(UsageError, match=r"kept in torch\.bfloat16 cannot be gathered as torch\.float32"):
        plan(narrow, Setting(2, compute_dtype=torch.float32))


def test_times_are_those_of_the_busiest_link() -> None:
    inside = Setting(4, inside_bytes_per_s=100.0)
    assert [each.seconds for each in one(FULL, inside).traffic] == [42.0, 27.0, 42.0]
    assert one(FULL, inside).communication_s == 111.0
    between = Setting(4, node_size=2, inside_bytes_per_s=100.0, between_bytes_per_s=10.0)
    assert [each.seconds for each in one(GRAD, between).traffic] == [280.0, 280.0]  # half of it crosses, once for both ranks
    assert [each.seconds for each in one(HYBRID, between).traffic] == [28.0, 18.0, 28.0, 560.0]  # two ranks share a node's link


def test_16_bit_sums_cross_between_nodes_of_several_ranks_as_float32() -> None:
    def reduction(dtype: torch.dtype, node_size: int) -> Traffic:
        setting = Setting(4, node_size=node_size, reduce_dtype=dtype, inside_bytes_per_s=1e9, between_bytes_per_s=10.0)
        return one(GRAD, setting).traffic[1]

    assert reduction(torch.float32, 2).seconds == 280.0
    assert reduction(torch.bfloat16, 2).seconds == 280.0
    assert reduction(torch.bfloat16, 2).bytes_sent == 2800 / 2 + 280 * 10 / 2  # half to the neighbour, half of the bytes on the link
    assert reduction(torch.float32, 1).seconds == 420.0
    assert reduction(torch.bfloat16, 1).seconds == 210.0  # exchanged directly, not in a ring


def test_secondary_shards_are_those_of_what_is_gathered_again() -> None:
    planned = one(FULL, Setting(4, reshard_after_forward=2))
    without = one(FULL, Setting(4)).memory
    assert planned.memory.secondary == 9 * 4 * 100 // 2  # the root and the last layer are held
    assert planned.memory.total == without.total + planned.memory.secondary
    assert [(each.op, each.count, each.bytes_sent) for each in planned.traffic] == [
        ("all_gather", 11, 4200),
        ("all_gather", 9, 9 * 400 // 2),
        ("reduce_scatter", 11, 4200),
    ]


def test_parameters_that_are_kept_whole_are_planned_as_those_of_zero_2() -> None:
    kept, grad = one(FULL, Setting(4, reshard_after_forward=False)), one(GRAD, Setting(4))
    assert (kept.memory, kept.traffic) == (grad.memory, grad.traffic)
    freed, full = one(FULL, Setting(4, reshard_after_forward=True)), one(FULL, Setting(4))
    assert (freed.memory, freed.traffic) == (full.memory, full.traffic)


def test_secondary_shards_are_not_compressed() -> None:
    setting = Setting(4, compression=Compression("int8", block=16), compute_dtype=torch.float32, reshard_after_forward=2)
    planned = one(FULL, setting)
    assert planned.traffic[1].bytes_sent == 9 * 400 // 2
    assert planned.memory.secondary == 9 * 400 // 2
    layer, root = 4 * (25 + 4 * 2), 4 * (100 + 4 * 7)
    assert planned.memory.packed == root + layer  # the most is when forward begins; backward packs no parameters


@pytest.mark.parametrize(
    ("world_size", "node_size", "neighbours", "seconds"),
    [
        (8, 4, 4, 27.0),  # the neighbours are one node: 3/4 of 9 · 400 bytes, at 100 bytes a second
        (8, 4, 2, 18.0),
        (8, 2, 4, 180.0),  # they are on two nodes: half of the bytes leave each node, at 10 bytes a second
        (12, 4, 6, 240.0),  # the second node takes part in two laps, and gives each what its other node lacks: 2/3 in all
        (6, 3, 2, 180.0),  # one of the three laps crosses
    ],
)
def test_neighbours_gather_where_they_are(world_size: int, node_size: int, neighbours: int, seconds: float) -> None:
    speeds = {"inside_bytes_per_s": 100.0, "between_bytes_per_s": 10.0}
    setting = Setting(world_size, node_size=node_size, reshard_after_forward=neighbours, **speeds)  # type: ignore[arg-type]
    again = one(FULL, setting).traffic[1]
    assert again.bytes_sent == round(3600 * (neighbours - 1) / neighbours)
    assert again.seconds == pytest.approx(seconds)


def test_what_suits_full_shard_alone_is_planned_for_it_alone() -> None:
    plans = plan(LAYERS, Setting(16, node_size=4, reshard_after_forward=4))
    assert {each.strategy: each.reshard_after_forward for each in plans} == {FULL: 4, GRAD: None, HYBRID: None, ZERO_1: None, NONE: None}
    plans = plan(LAYERS, Setting(16, node_size=4, reshard_after_forward=2))
    assert [each.strategy for each in plans if each.memory.secondary] == [FULL, HYBRID]
    with pytest.raises(UsageError, match="must divide the 16 ranks"):
        plan(LAYERS, Setting(16, node_size=4, reshard_after_forward=3))
    with pytest.raises(UsageError, match="must divide the 4 ranks"):
        plan(LAYERS, Setting(16, node_size=4, reshard_after_forward=4), [HYBRID])


@pytest.mark.parametrize(
    ("strategy", "on_cpu", "on_gpu"),  # parameters, gradients and two moments; gathered and reducing
    [
        (FULL, 4 * 1400, 4 * (600 + 700)),
        (GRAD, 4 * 1400, 4 * (1400 + 700)),
        (HYBRID, 4 * 2800, 4 * (600 + 700)),
        (NONE, 4 * 5600, 4 * (1400 + 700)),  # shards are whole, but the GPU computes with copies of them
    ],
)
def test_with_offload_what_stays_is_on_the_cpu(strategy: Strategy, on_cpu: int, on_gpu: int) -> None:
    planned = one(strategy, Setting(4, node_size=2, cpu_offload=True))
    counters = 4 * 11
    assert (planned.memory.on_cpu - counters, planned.memory.on_gpu) == (on_cpu, on_gpu)
    assert planned.traffic == one(strategy, Setting(4, node_size=2)).traffic


def test_offload_of_a_rank_alone_copies_its_units_to_the_gpu() -> None:
    memory = one(FULL, Setting(1, cpu_offload=True)).memory
    assert (memory.on_cpu, memory.gathered) == (4 * 5600 + 4 * 11, 4 * 600)


def test_residuals_activations_and_copies_have_their_places() -> None:
    model = ModelSize("kept", LAYERS.units, activation_bytes=1000)
    compression = Compression("int8", "int8", block=16)
    memory = one(FULL, Setting(4, compression=compression, cpu_offload=True, elastic=True), model).memory
    assert memory.on_cpu == memory.parameters + memory.gradients + memory.optimizer + memory.copies
    assert memory.on_gpu == memory.gathered + memory.reducing + memory.residuals + memory.packed + 1000
    whole = one(FULL, Setting(4, elastic=True), model).memory
    assert whole.on_cpu == whole.copies  # the copies of the last commit are always in host memory


def test_zero_1_is_planned_without_offload_or_refused() -> None:
    plans = plan(LAYERS, Setting(4, cpu_offload=True))
    assert {each.strategy: each.cpu_offload for each in plans} == {FULL: True, GRAD: True, ZERO_1: False, NONE: True}
    with pytest.raises(UsageError, match="cpu_offload: with ZeRO-1 the module is whole"):
        plan(LAYERS, Setting(4, cpu_offload=True), [ZERO_1])


def test_no_time_without_the_speed_that_it_needs() -> None:
    assert one(FULL, Setting(4)).communication_s is None
    across = Setting(4, node_size=2, inside_bytes_per_s=100.0)
    assert [each.seconds is None for each in one(HYBRID, across).traffic] == [False, False, False, True]
    assert one(HYBRID, across).communication_s is None


def test_all_strategies_that_differ_are_compared() -> None:
    assert [each.strategy for each in plan(LAYERS, Setting(4))] == [FULL, GRAD, ZERO_1, NONE]
    assert [each.strategy for each in plan(LAYERS, Setting(4, node_size=2))] == list(Strategy)
