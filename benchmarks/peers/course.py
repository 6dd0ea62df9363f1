"""What every contestant trains, and the lines in which it and the contest talk. Needs only torch.

A contestant says {"ready": true} on stdout when its model is ready. Each line on stdin is a number of steps; for each step it says a line:

    step      how many steps are done for good, this one included
    loss      of this rank's batch, before the step
    world     ranks that took part
    began_s, ended_s
              by the machine's monotonic clock, which all processes share

{"vain": true} says that a step was tried and came to nothing. It ends when stdin does.
"""

import json
import os
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt import GPT, GPTConfig

SEQUENCES, CONTEXT, RATE = 4, 128, 1e-3
RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
MEETING = os.environ.get("MEETING", "")  # where the contestants of a group find each other
LEAST = int(os.environ.get("LEAST", "1"))  # with fewer ranks there is no step


def new_model() -> GPT:
    """The same model on all ranks and for all contestants: 25.4 million parameters."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    return GPT(GPTConfig(512, 8, 8, CONTEXT, 0))


def new_batch() -> Tensor:
    """This rank's batch; it stays the same, so that the loss falls fast and a wrong gradient shows at once."""
    return torch.randint(256, (SEQUENCES, CONTEXT + 1), generator=torch.Generator().manual_seed(RANK))


def new_optimizer(parameters: object) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=RATE, fused=True)  # type: ignore[arg-type]  # parameters or groups of them, as torch has it


def loss_of(logits: Tensor, batch: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def loss_and_gradients(model: nn.Module, batch: Tensor) -> float:
    loss = loss_of(model(batch[:, :-1]), batch)
    loss.backward()  # type: ignore[no-untyped-call]  # torch has no annotation for it
    return loss.item()


def say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def say_step(step: int, loss: float, world: int, began_s: float) -> None:
    say(step=step, loss=loss, world=world, began_s=began_s, ended_s=time.monotonic())


def serve(step: Callable[[], tuple[float, int] | None]) -> None:
    """Do steps as told, to the end of stdin. `step` returns its loss and how many ranks took part, or None if it came to nothing."""
    say(ready=True)
    done = 0
    for line in sys.stdin:
        goal = done + int(line)
        while done < goal:
            began_s = time.monotonic()
            result = step()
            if result is None:
                say(vain=True)
            else:
                done += 1
                say_step(done, *result, began_s)
