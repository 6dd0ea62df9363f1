"""`Part`: the task of one worker of a test's cluster."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardnet import elastic
from shardnet.elastic import State
from shardnet.testing.saboteur import Saboteur
from shardnet.training import Cluster, connect


@dataclass(frozen=True, slots=True)
class Part:
    """A training function and how to join for it.

    train     `train(cluster, *arguments)`; `train(cluster, state, *arguments)` in an elastic run. A coroutine function or not
    settings  of `connect`
    every     steps between commits; for elastic runs, otherwise 0
    """

    train: Callable[..., Any]
    arguments: tuple[Any, ...]
    settings: dict[str, Any]
    every: int = 0

    async def play(self, saboteur: Saboteur, joined: Callable[[Cluster], None]) -> Any:
        """Join, train and leave; returns the result of `train`. `joined` is called when the worker has joined for the first time."""

        first = True

        async def train(cluster: Cluster, *state: State) -> Any:
            nonlocal first
            if first:
                first = False
                joined(cluster)
                saboteur.attend(cluster)
            result = self.train(cluster, *state, *self.arguments)
            return await result if inspect.isawaitable(result) else result

        if self.every:
            return await elastic.run(train, every=self.every, **self.settings)
        async with connect(**self.settings) as cluster:
            return await train(cluster)
