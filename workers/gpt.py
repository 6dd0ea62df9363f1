"""A byte-level GPT: RMSNorm, rotary positions, normalised queries and keys, SwiGLU, and bigrams.

Shapes: B sequences, T bytes, D = dim, H = heads, E = D / H.

[Note: bigrams] A byte says little, and the first thing a model learns is which byte follows which two. A table of
vectors for pairs of bytes gives it that by one look-up, at almost no compute. A pair is made of the lower seven bits of
both bytes. That is exact for ASCII; where other bytes collide, their own embeddings still tell them apart.

[Note: zero outputs] The layers that write into the residual stream, and the head, start at zero: every block begins
as the identity and the untrained loss is exactly ln 256 = 5.545.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256  # all bytes
ROTARY_BASE = 10_000.0

Rotary = tuple[Tensor, Tensor]  # cosines and sines, each T×(E/2)


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """The size of a model. `context` is the longest distance in bytes that attention looks back."""

    dim: int = 256
    layers: int = 4
    heads: int = 4
    context: int = 256
    bigrams: int = 128  # width of the vectors of byte pairs, see [Note: bigrams]; 0: no such table

    def __post_init__(self) -> None:
        if min(self.dim, self.layers, self.heads, self.context) < 1 or self.bigrams < 0:
            raise ValueError(f"sizes of a model must be positive, got {self}")
        if self.dim % (2 * self.heads):
            raise ValueError(f"dim must be a multiple of 2 · heads (rotary positions turn pairs), got dim={self.dim}, heads={self.heads}")

    @property
    def hidden(self) -> int:
        """Width of the feed-forward layer: 8/3 · dim, so that SwiGLU's three matrices cost what two of 4 · dim do."""
        return -(-8 * self.dim // 3 // 32) * 32


class Past:
    """Keys and values of one layer, B×H×T×E, kept while a text is generated."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._kept: tuple[Tensor, Tensor] | None = None

    def __bool__(self) -> bool:
        return self._kept is not None

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add new keys and values, and return all that are kept; the oldest go once the window is full."""
        if self._kept is not None:
            key, value = torch.cat((self._kept[0], key), dim=2), torch.cat((self._kept[1], value), dim=2)
        self._kept = key[:, :, -self._window :], value[:, :, -self._window :]
        return self._kept


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)
        _initialise(self.qkv)
        nn.init.zeros_(self.out.weight)  # [Note: zero outputs]

    def forward(self, x: Tensor, rotary: Rotary, past: Past | None = None) -> Tensor:
        """B×T×D → B×T×D. After `past`, a text must continue byte by byte (T = 1)."""
        batch, length, dim = x.shape
        query, key, value = self.qkv(x).view(batch, length, 3 * self.heads, -1).transpose(1, 2).chunk(3, dim=1)
        query, key = _rotate(_unit(query), rotary), _rotate(_unit(key), rotary)
        first = not past
        if past is not None:
            key, value = past.extend(key, value)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=first)
        out: Tensor = self.out(attended.transpose(1, 2).reshape(batch, length, dim))
        return out


class FeedForward(nn.Module):
    """SwiGLU: silu(gate) · up, then down."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.dim, 2 * config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.dim, bias=False)
        _initialise(self.gate_up)
        nn.init.zeros_(self.down.weight)  # [Note: zero outputs]

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        down: Tensor = self.down(F.silu(gate) * up)
        return down


class Block(nn.Module):
    """Attention and feed-forward, each added to the residual stream. The natural unit of sharding."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.dim)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, rotary: Rotary, past: Past | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotary, past)
        fed: Tensor = self.feed_forward(self.feed_forward_norm(x))
        return x + fed


class Bigrams(nn.Module):
    """A vector for each byte and the one before it, B×T → B×T×D. A unit of sharding of its own: its table is large."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.table = nn.Embedding(128 * 128, config.bigrams)
        self.out = nn.Linear(config.bigrams, config.dim, bias=False)
        nn.init.normal_(self.table.weight, std=0.5)
        _initialise(self.out)

    def forward(self, text: Tensor) -> Tensor:
        before = F.pad(text, (1, 0))[:, :-1]
        vectors: Tensor = self.out(self.table(before % 128 * 128 + text % 128))
        return vectors


class GPT(nn.Module):
    """Map each byte to the logits of the byte that follows it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCABULARY, config.dim)
        self.bigrams = Bigrams(config) if config.bigrams else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim)
        self.head = nn.Linear(config.dim, VOCABULARY, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.5)
        nn.init.zeros_(self.head.weight)  # [Note: zero outputs]

    def forward(self, text: Tensor) -> Tensor:
        """B×T bytes as int64 → B×T×256 logits."""
        x = self._embed(text)
        rotary = self._rotary(0, text.shape[1], text.device)
        for block in self.blocks:
            x = block(x, rotary)
        logits: Tensor = self.head(self.norm(x))
        return logits

    @torch.no_grad()
    def generate(self, prompt: bytes, length: int, *, temperature: float = 0.8, top_k: int = 50, seed: int = 0) -> bytes:
        """`prompt` and `length` more bytes, drawn from the `top_k` likeliest. Call it on an unsharded model.

        Keys and values are kept, and the window slides: text may be longer than the context.
        """
        generator = torch.Generator().manual_seed(seed)
        pasts = [Past(self.config.context) for _ in self.blocks]
        text = list((prompt or b"\n")[-self.config.context :])
        fresh, position = len(text), 0  # how many bytes the model has not seen yet, and how many it has
        for _ in range(length):
            x = self._embed(torch.tensor([text[-fresh - 1 :]]))[:, -fresh:]  # one byte more, for the first bigram
            rotary = self._rotary(position, fresh, self.head.weight.device)
            for block, past in zip(self.blocks, pasts, strict=True):
                x = block(x, rotary, past)
            logits = self.head(self.norm(x[0, -1])) / max(temperature, 1e-6)
            best, candidates = logits.topk(min(top_k, VOCABULARY))
            text.append(int(candidates[torch.multinomial(best.softmax(dim=0), 1, generator=generator)]))
            fresh, position = 1, position + fresh
        return (prompt or b"\n")[: -self.config.context] + bytes(text)

    def _embed(self, text: Tensor) -> Tensor:
        x: Tensor = self.embedding(text)
        return x if self.bigrams is None else x + self.bigrams(text)

    def _rotary(self, start: int, length: int, device: torch.device) -> Rotary:
        size = self.config.dim // self.config.heads
        frequencies = ROTARY_BASE ** (-torch.arange(0, size, 2, device=device) / size)
        angles = torch.outer(torch.arange(start, start + length, device=device), frequencies)
        return angles.cos(), angles.sin()


def parameter_count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _initialise(linear: nn.Linear) -> None:
    nn.init.normal_(linear.weight, std=0.6 * linear.in_features**-0.5)


def _unit(x: Tensor) -> Tensor:
    """Vectors of norm √E: attention logits stay bounded, so the learning rate may be high."""
    return F.rms_norm(x, x.shape[-1:])


def _rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Turn pair i of a vector at position t by the angle t · frequency i."""
    cos, sin = rotary
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1)
