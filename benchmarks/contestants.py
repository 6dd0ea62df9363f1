"""The same model trained in three ways: sharded by shardnet, sharded by torch, and by every rank for itself."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.plan import Training
from benchmarks.targets import ALONE, COMPRESSED, FSDP2, OURS, STEPPING
from gpt import GPT, Block, GPTConfig
from shardnet import FSDP, Backend
from shardnet.fsdp import Compression


class Trainer:
    """A model, its optimizer and one batch, on one rank.

    The batch stays the same, so that the loss falls fast: a wrong gradient shows in it at once.
    """

    def __init__(self, name: str, model: nn.Module, batch: Tensor) -> None:
        self.name = name
        self.losses: list[float] = []
        self._model = model
        self._inputs, self._targets = batch[:, :-1], batch[:, 1:]
        self._optimizer = torch.optim.AdamW(self.optimized(), lr=1e-3)

    def step(self) -> None:
        """Forward, backward, optimizer."""
        logits = self._model(self._inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), self._targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no annotation for it
        self.update()
        self.losses.append(loss.item())

    def optimized(self) -> list[nn.Parameter]:
        return list(self._model.parameters())

    def update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()


class Alone(Trainer):
    """The compute of one rank of a sharded model and nothing else: forward and backward of the whole model, and the
    optimizer on 1/`ranks` of each parameter."""

    def __init__(self, name: str, model: nn.Module, batch: Tensor, ranks: int) -> None:
        self._whole = list(model.parameters())
        self._parts = [nn.Parameter(whole.detach().view(-1)[: -(-whole.numel() // ranks)]) for whole in self._whole]
        super().__init__(name, model, batch)

    def optimized(self) -> list[nn.Parameter]:
        return self._parts

    def update(self) -> None:
        for whole, part in zip(self._whole, self._parts, strict=True):
            assert whole.grad is not None
            part.grad = whole.grad.view(-1)[: part.numel()]
        super().update()
        self._model.zero_grad()


class Sharded(Trainer):
    """Sharded by shardnet; the optimizer steps after backward or, unit by unit, within it."""

    def __init__(self, name: str, model: FSDP, batch: Tensor, *, in_backward: bool) -> None:
        super().__init__(name, model, batch)
        if in_backward:
            model.step_in_backward(self._optimizer)


def parameter_bytes(session: Training) -> int:
    """Size of the whole model's parameters."""
    with torch.device("meta"):
        return sum(parameter.nbytes for parameter in GPT(_config(session)).parameters())


def trainers(session: Training, backend: Backend) -> list[Trainer]:
    """Shardnet, FSDP2 over gloo, alone, and shardnet in other ways; equal parameters and data. A collective."""
    compressed = [COMPRESSED[weights] for weights in session.compressions]
    return [trainer(name, session, backend) for name in (OURS, FSDP2, ALONE, STEPPING, *compressed)]


def trainer(name: str, session: Training, backend: Backend) -> Trainer:
    """The training called `name`. A collective."""
    batch, model = own_batch(session, backend.rank), new_model(session)
    if name == FSDP2:
        return Trainer(name, fully_sharded(model, init_device_mesh("cpu", (backend.world_size,))), batch)
    if name == ALONE:
        return Alone(name, model, batch, backend.world_size)
    compression = next((Compression(weights, "int8") for weights in session.compressions if COMPRESSED[weights] == name), None)
    return Sharded(name, FSDP(model, backend, units=(Block,), compression=compression), batch, in_backward=name == STEPPING)


def own_batch(session: Training, rank: int) -> Tensor:
    """Sequences of one rank, with the byte that follows each."""
    return torch.randint(256, (session.batch, session.context + 1), generator=torch.Generator().manual_seed(rank))


def new_model(session: Training) -> GPT:
    """The same model on all ranks."""
    torch.manual_seed(1)
    return GPT(_config(session))


def _config(session: Training) -> GPTConfig:
    return GPTConfig(session.dim, session.layers, session.heads, session.context, session.bigrams)


def fully_sharded(model: GPT, mesh: DeviceMesh) -> nn.Module:
    """Sharded by torch in the same units, with its defaults otherwise."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model
