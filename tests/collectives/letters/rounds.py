"""What the tests of rounds have in common."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from shardnet.backend import Pending
from shardnet.backend.cluster import ClusterBackend
from shardnet.collectives.letters.attendant import Attendant
from shardnet.collectives.letters.letter_round import LetterRound
from shardnet.config import KIB, Limits

Ranks = Sequence[ClusterBackend]
# 16 KiB by letter, of which a mailbox holds four; twice that and more otherwise
LIMITS = Limits(letter_bytes=16 * KIB)
SMALL, LARGE, LARGER = torch.ones(4), torch.ones(5_000), torch.ones(12_000)


def ones_of(ranks: int, small: torch.Tensor = SMALL) -> torch.Tensor:
    return small * ranks


def leave_all_to_threads(patched: pytest.MonkeyPatch) -> None:
    """Let the attendant look after nothing."""
    for call in ("take", "expect"):
        patched.setattr(Attendant, call, lambda *_: None)


def is_round(handle: Pending[Any]) -> bool:
    return isinstance(handle._future, LetterRound)


def wait(handle: Pending[torch.Tensor]) -> torch.Tensor:
    return handle.wait()


async def result_of(handle: Pending[torch.Tensor]) -> torch.Tensor:
    return await handle


def interrupt(*_: object) -> None:
    """Do to a thread what Ctrl-C does to the main thread."""
    raise KeyboardInterrupt
