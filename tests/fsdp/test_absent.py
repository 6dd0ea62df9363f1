"""Parameters that a model reads outside of their unit's forward, where they are sharded: refused, whatever would have come of it."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardnet.backend import Backend
from shardnet.errors import StateError
from shardnet.fsdp import FSDP
from shardnet.sharding import ShardingStrategy
from tests.fsdp.parity import check_at_rest
from tests.fsdp.ranks import run_ranks

Tensor = torch.Tensor
Reading = Callable[["Reader", Tensor], Tensor]


class Reader(nn.Module):
    """Does something with its parts' parameters before, between and after their forwards, and on another one's behalf."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 2)
        self.norm = nn.LayerNorm(2)
        self.before: Reading | None = None
        self.between: Reading | None = None
        self.after: Reading | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self._read(self.before, x)
        out: Tensor = self._read(self.between, self.embedding(x))
        return self._read(self.after, self.norm(out))

    def _read(self, reading: Reading | None, x: Tensor) -> Tensor:
        return x if reading is None else reading(self, x)


def wrapped(backend: Backend, **options: object) -> tuple[Reader, FSDP]:
    reader = Reader()
    return reader, FSDP(reader, backend, units=(nn.Embedding, nn.LayerNorm), **options)  # type: ignore[arg-type]


TOKENS = torch.arange(6).reshape(2, 3)
READINGS: dict[str, tuple[str, Reading]] = {
    "tied": ("embedding.weight", lambda reader, x: F.linear(x, reader.embedding.weight)),
    "one element, which fits everywhere": ("norm.bias", lambda reader, x: x + reader.norm.bias),
    "a copy": ("norm.weight", lambda reader, x: x * reader.norm.weight.detach().clone()),
    "among others": ("norm.weight", lambda reader, x: torch.cat([x.flatten(), reader.norm.weight])),
    "changed": ("norm.weight", lambda reader, x: reader.norm.weight.data.mul_(2) + x),
}


@pytest.mark.parametrize("place", ["before", "between", "after"])
@pytest.mark.parametrize("reading", list(READINGS))
def test_what_is_read_outside_of_its_unit_is_refused(reading: str, place: str) -> None:
    name, read = READINGS[reading]

    def work(backend: Backend) -> None:
        reader, model = wrapped(backend)
        originals = list(model.parameters())
        setattr(reader, place, read)
        unit = name.partition(".")[0]
        with pytest.raises(StateError, match=f"^{name} is sharded here: it is whole only while its unit {unit} runs"):
            model(TOKENS)
        check_at_rest(model)
        setattr(reader, place, None)
        assert all(one is other for one, other in zip(model.parameters(), originals, strict=True))
        model(TOKENS).sum().backward()
        assert all(parameter.grad is not None for parameter in originals)

    run_ranks(2, work)


@pytest.mark.parametrize("strategy", list(ShardingStrategy))
def test_with_every_strategy(strategy: ShardingStrategy) -> None:
    def work(backend: Backend) -> None:
        size = {"intra_node_size": 2} if strategy is ShardingStrategy.HYBRID_SHARD else {}
        reader, model = wrapped(backend, strategy=strategy, **size)
        reader.after = lambda reader, x: F.linear(x, reader.embedding.weight)
        for _ in range(2):
            with pytest.raises(StateError, match=r"^embedding\.weight is sharded here"):
                model(TOKENS)
        check_at_rest(model)

    run_ranks(2, work)


def test_what_a_parameter_is_like_may_be_asked_anywhere() -> None:
    seen = []

    def ask(reader: Reader, x: Tensor) -> Tensor:
        weight = reader.embedding.weight
        seen.append((weight.shape, weight.dtype, weight.device, weight.numel(), weight.dim(), weight.requires_grad, repr(weight)))
        assert isinstance(weight, nn.Parameter)
        assert {each.dtype for each in reader.parameters()} == {torch.float64}
        return x.to(weight.device)

    def work(backend: Backend) -> None:
        reader = Reader().double()
        reader.norm.requires_grad_(False)
        model = FSDP(reader, backend, units=(nn.Embedding, nn.LayerNorm))
        device = reader.embedding.weight.device
        reader.before = reader.between = reader.after = ask
        model(TOKENS).sum().backward()
        what = "<embedding.weight, sharded, torch.float64 (10, 2)>"
        assert set(seen) == {(torch.Size([10, 2]), torch.float64, device, 20, 2, True, what)}

    run_ranks(2, work)


def test_a_part_of_the_model_alone() -> None:
    """All else is absent, the part's own parameters are not, and a module that is no unit belongs to the one around it."""

    def work(backend: Backend) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.MultiheadAttention(2, 1))
        FSDP(model, backend, units=(nn.Sequential, nn.MultiheadAttention))
        x = torch.ones(3, 2)
        assert model[1](x, x, x)[0].shape == (3, 2)
        model[1].register_forward_pre_hook(lambda _, given: (given[0] + model[0].bias, *given[1:]))
        with pytest.raises(StateError, match=r"^0\.bias is sharded here: it is whole only while its unit Sequential runs"):
            model[1](x, x, x)

    run_ranks(2, work)
