"""Memory that comes and goes under tensors that stay, and the pool that it goes to."""

import pytest
import torch

from shardnet.fsdp.full_buffer import FullBuffer
from shardnet.fsdp.memory import MemoryMeter
from shardnet.fsdp.pool import BufferPool

CPU = torch.device("cpu")


@pytest.fixture
def meter() -> MemoryMeter:
    return MemoryMeter()


@pytest.fixture
def pool(meter: MemoryMeter) -> BufferPool:
    return BufferPool(meter)


def make(numel: int, meter: MemoryMeter, pool: BufferPool) -> FullBuffer:
    return FullBuffer(numel, torch.float32, CPU, owner="layer", gauge=meter.full_parameters, pool=pool)


def test_what_autograd_saved_finds_its_bytes_again(meter: MemoryMeter, pool: BufferPool) -> None:
    buffer = make(3, meter, pool)
    weight = torch.nn.Parameter(buffer.tensor.view(3))
    buffer.alias().copy_(torch.tensor([1.0, 2.0, 3.0]))
    x = torch.ones(3, requires_grad=True)
    y = (x * weight).sum()
    buffer.free()
    assert meter.full_parameters.current_bytes == 0
    buffer.allocate()
    buffer.alias().copy_(torch.tensor([4.0, 5.0, 6.0]))
    buffer.reveal()
    assert weight._version == 0
    y.backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert x.grad.tolist() == [4, 5, 6]
    assert (meter.full_parameters.current_bytes, meter.full_parameters.peak_bytes) == (12, 12)


def test_what_is_being_filled_cannot_be_read(meter: MemoryMeter, pool: BufferPool) -> None:
    """Backward may try to, if it is not told which unit it needs; then views are made first."""
    buffer = make(6, meter, pool)
    weight = buffer.tensor.view(2, 3)
    buffer.free()
    buffer.allocate()
    buffer.alias().copy_(torch.arange(6.0))
    for read in (weight.sum, lambda: weight.t() @ torch.ones(2), lambda: weight[1].tolist()):
        with pytest.raises(RuntimeError, match="the full parameters of layer are freed"):
            read()
    buffer.reveal()
    assert weight.t().tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    buffer.free()
    with pytest.raises(RuntimeError, match="are freed"):
        weight.t().sum()


def test_what_was_being_filled_can_be_given_up(meter: MemoryMeter, pool: BufferPool) -> None:
    buffer = make(1000, meter, pool)
    address = buffer.tensor.data_ptr()
    buffer.free()
    buffer.allocate()
    buffer.free()
    assert (meter.full_parameters.current_bytes, meter.pooled_bytes) == (0, 4000)
    buffer.allocate()
    buffer.reveal()
    assert buffer.tensor.data_ptr() == address


def test_freeing_and_allocating_twice_counts_once(meter: MemoryMeter, pool: BufferPool) -> None:
    buffer = make(5, meter, pool)
    for _ in range(2):
        buffer.free()
        buffer.free()
        assert meter.full_parameters.current_bytes == 0
        buffer.allocate()
        buffer.allocate()
        assert meter.full_parameters.current_bytes == 20


def test_memory_goes_from_one_buffer_to_the_next(meter: MemoryMeter, pool: BufferPool) -> None:
    first, second = make(1000, meter, pool), make(1000, meter, pool)
    second.free()
    address = first.tensor.data_ptr()
    first.free()
    assert meter.pooled_bytes == 2 * 4000
    for each in (second, first):
        each.allocate()
        each.reveal()
    assert address in (first.tensor.data_ptr(), second.tensor.data_ptr())
    assert meter.pooled_bytes == 0


def test_the_pool_never_holds_more_than_was_in_use(meter: MemoryMeter, pool: BufferPool) -> None:
    """Ten sizes, one at a time: without a bound the pool would end with all of them."""
    for numel in range(100, 110):
        meter.full_gradients.add(4 * numel)
        memory = pool.take(4 * numel, CPU)
        meter.full_gradients.remove(4 * numel)
        pool.give(memory)
        assert meter.pooled_bytes <= meter.full_gradients.peak_bytes <= 4 * 109
    assert meter.pooled_bytes == 4 * 109


def test_memory_that_is_not_to_be_kept_is_not(meter: MemoryMeter, pool: BufferPool) -> None:
    buffer = make(8, meter, pool)
    buffer.allocate()
    buffer.free(keep_memory=False)
    assert (meter.pooled_bytes, meter.full_parameters.current_bytes) == (0, 0)


def test_an_empty_buffer_is_never_read_and_never_freed(meter: MemoryMeter, pool: BufferPool) -> None:
    buffer = make(0, meter, pool)
    buffer.free()
    buffer.allocate()
    assert buffer.alias().tolist() == []
