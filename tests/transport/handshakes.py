"""`be_impatient`: for tests of connections that say nothing."""

import pytest

from shardnet.transport import direct, front_door, options

BRIEF_S = 0.5


def be_impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection to this process that says nothing is closed after BRIEF_S, and one that grpcio has is pinged as often as it will."""
    for module in (direct, front_door, options):
        monkeypatch.setattr(module, "HANDSHAKE_S", BRIEF_S)
    monkeypatch.setattr(options, "ONLOOKER_PING_MS", 0)
