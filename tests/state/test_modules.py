"""The names under which an optimizer's state is kept beside the tensors of a module."""

import torch

from shardnet.state.modules import without_moments


def test_names_with_colons() -> None:
    """A module may have them, too: `b: c` is a buffer, `b: momentum` the state of the parameter `b`."""
    kept = {
        name: torch.tensor(float(number)) for number, name in enumerate(("b", "b: c", "b: momentum", "b: c: momentum", "b: number step"))
    }
    others, moments = without_moments(kept, {"b", "b: c"})
    assert others == {"b": kept["b"], "b: c": kept["b: c"]}
    assert moments == {"b": {"momentum": kept["b: momentum"], "step": 4.0}, "b: c": {"momentum": kept["b: c: momentum"]}}
