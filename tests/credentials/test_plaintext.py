"""Plaintext stays on this machine unless somebody says otherwise."""

import logging

import pytest

from shardnet.credentials import Security, check_plaintext, security
from shardnet.errors import AddressError, PlaintextRefused


@pytest.mark.parametrize("address", ["127.0.0.1:1", "localhost:0", "[::1]:1"])
def test_loopback_is_allowed(address: str) -> None:
    check_plaintext(address, insecure=False)


@pytest.mark.parametrize("address", ["0.0.0.0:1", "[::]:1", "10.0.0.1:1", "example.org:1"])
def test_elsewhere_is_refused_with_what_to_do(address: str) -> None:
    with pytest.raises(
        PlaintextRefused,
        match=r"is not a loopback address.*shardnet certs token.*"
        r"use a loopback address such as 127\.0\.0\.1, or allow it with insecure=True",
    ):
        check_plaintext(address, insecure=False)


def test_explicit_choice_is_logged_once_a_host(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security, "_warned", set())
    with caplog.at_level(logging.WARNING):
        for port in (1, 2, 3):
            check_plaintext(f"192.0.2.7:{port}", insecure=True)
        check_plaintext("192.0.2.8:1", insecure=True)
        check_plaintext("127.0.0.1:1", insecure=True)
    assert [r.getMessage().split(",")[0] for r in caplog.records] == [
        "plaintext connections on 192.0.2.7",
        "plaintext connections on 192.0.2.8",
    ]


def test_channels_are_checked_before_they_are_made() -> None:
    with pytest.raises(PlaintextRefused):
        Security().channel("192.0.2.7:1", ())
    with pytest.raises(AddressError):
        Security().channel("somewhere", ())
