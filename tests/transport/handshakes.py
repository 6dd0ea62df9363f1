"""`be_impatient`: for tests of connections that say nothing."""

import pytest

from shardnet.transport import direct, front_door, options

BRIEF_S = 0.5


def be_impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process close a connection that says nothing after BRIEF_S, and let grpcio ping its connections as often as it can."""
    for module in (direct, front_door, options):
        monkeypatch.setattr(module, "HANDSHAKE_S", BRIEF_S)
    monkeypatch.setattr(options, "ONLOOKER_PING_MS", 0)
