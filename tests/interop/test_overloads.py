"""Calls in torch's different forms as one."""

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch._C import _distributed_c10d as c10d

from shardnet.interop.overloads import overloaded

T = torch.zeros(1)


class Group:
    @overloaded(c10d.GatherOptions, [2, 1], "root timeout")
    def gather(self, outputs: Any, inputs: Any, opts: Any) -> tuple[Any, Any, Any]:
        return outputs, inputs, opts


def test_lists_around_tensors() -> None:
    for outputs, inputs in (([[T, T]], [T]), ([T, T], T)):
        got = Group().gather(outputs, inputs)
        assert [len(each) for each in got[0]] == [2]
        assert [each is T for each in got[1]] == [True]
    assert Group().gather([], T)[:2] == ([], [T])
    assert Group().gather([[]], [T])[:2] == ([[]], [T])


def test_options_are_those_given_or_made_of_what_is() -> None:
    options = c10d.GatherOptions()
    assert Group().gather([], T, options)[2] is options
    assert Group().gather([], T, opts=options)[2] is options
    made = Group().gather([], T, 3, timedelta(seconds=5))[2]
    assert (made.rootRank, made.timeout) == (3, timedelta(seconds=5))
    made = Group().gather(output_tensors=[], input_tensor=T, root=2, timeout=None)[2]
    assert (made.rootRank, made.timeout) == (2, c10d.GatherOptions().timeout)


def test_what_is_no_form_of_torchs() -> None:
    with pytest.raises(TypeError, match="the arguments after the tensors must be options, or root, timeout; got 1, None, 2"):
        Group().gather([], T, 1, None, 2)
    with pytest.raises(TypeError, match="unexpected keyword argument 'spam'"):
        Group().gather([], T, spam=1)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'inputs'"):
        Group().gather([])
