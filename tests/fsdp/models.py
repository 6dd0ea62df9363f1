"""Small models whose sizes do not divide by 2, 3 or 4."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn

from tests.devices import on_test_device

Tensor = torch.Tensor
_seeding = threading.Lock()  # torch's generator belongs to the process, and ranks are threads here


class Weighted(nn.Module):
    """y = x · sum(w) with w = [1, 2, 3, 4]: the model of the numeric cases."""

    def __init__(self, *values: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(values or (1, 2, 3, 4), dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.sum()


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)  # the gradient of a key bias is 0 except for rounding, which Adam amplifies
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class GPT(nn.Module):
    """Embedding and head are tied, both in the root."""

    def __init__(self, *, vocabulary: int = 31, width: int = 18, heads: int = 3, layers: int = 3, context: int = 16) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(context, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random numbers within depend only on `seed`."""
    with _seeding, torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def make_gpt(seed: int = 0, **sizes: int) -> GPT:
    with seeded(seed):
        return GPT(**sizes)


def token_batches(steps: int, samples: int, *, vocabulary: int = 31, length: int = 12, seed: int = 1) -> Tensor:
    """[steps, samples, length + 1]: inputs are [..., :-1], targets [..., 1:]."""
    generator = torch.Generator().manual_seed(seed)
    return on_test_device(torch.randint(vocabulary, (steps, samples, length + 1), generator=generator, device="cpu"))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Mean cross-entropy of the next token; `batch` [samples, length + 1]."""
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
