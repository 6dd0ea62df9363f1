"""Looking at all threads must not bring the process to a standstill."""

import gc
import sys
import threading

import pytest

from shardnet.frames import current_frames


def test_each_thread_has_its_frame() -> None:
    frames = current_frames()
    assert frames[threading.get_ident()].f_code.co_name in ("current_frames", "test_each_thread_has_its_frame")


@pytest.mark.parametrize("collects", [True, False])
def test_no_garbage_is_collected_meanwhile(monkeypatch: pytest.MonkeyPatch, collects: bool) -> None:
    during: list[bool] = []

    def look() -> dict[int, object]:
        during.append(gc.isenabled())
        return {}  # also to the tests' own watch, which looks meanwhile

    with monkeypatch.context() as patched:
        patched.setattr(sys, "_current_frames", look)
        if not collects:
            gc.disable()
        try:
            current_frames()
            assert not any(during)
            assert gc.isenabled() is collects
        finally:
            gc.enable()
