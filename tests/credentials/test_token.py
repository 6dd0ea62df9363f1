"""Certificates from a shared secret."""

import pytest

from shardnet.credentials import Identity, Role
from shardnet.credentials.authority import check
from shardnet.credentials.token import from_token, new_token
from shardnet.errors import CredentialsError


def test_one_token_is_one_authority() -> None:
    """Two are made separately, each with its own certificate: each trusts the other's."""
    token = new_token()
    one, other = from_token(token, Role.WORKER), from_token(token, Role.RENDEZVOUS)
    assert one.identity != other.identity
    assert one.identity.may_join("whatever")
    assert check(other.authority, one.certificate, one.key).identity == one.identity
    assert check(one.authority, other.certificate, other.key).identity == other.identity
    assert one.identity.is_anonymous


def test_two_tokens_are_two() -> None:
    one, other = from_token(new_token(), Role.WORKER), from_token(new_token(), Role.WORKER)
    with pytest.raises(CredentialsError, match="not issued by the authority"):
        check(other.authority, one.certificate, one.key)


def test_the_key_stays_the_same_from_version_to_version() -> None:
    """A rendezvous and workers of different versions must be able to meet."""
    made = from_token("shardnet-" + 43 * "x", Role.OPERATOR)
    assert check(AUTHORITY, made.certificate, made.key).identity == Identity(Role.OPERATOR, made.identity.name)


@pytest.mark.parametrize("token", ["secret", "shardnet-", "shardnet-short", 43 * "x", "shardnet-" + 43 * "ü", "shardnet-" + 43 * "x" + " "])
def test_what_could_be_guessed_is_refused(token: str) -> None:
    with pytest.raises(CredentialsError, match="was not made by `shardnet certs token`") as caught:
        from_token(token, Role.WORKER)
    assert token not in str(caught.value)


AUTHORITY = b"""-----BEGIN CERTIFICATE-----
MIIBgTCCASegAwIBAgIUKKUot/3U6CI9EpcPPT5t0EB831owCgYIKoZIzj0EAwIw
HTEbMBkGA1UEAwwSc2hhcmRuZXQgYXV0aG9yaXR5MB4XDTI2MTEyMjA3MDI1MVoX
DTM2MTExOTA4MDI1MVowHTEbMBkGA1UEAwwSc2hhcmRuZXQgYXV0aG9yaXR5MFkw
EwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEpePH1iX1/mismKzWj4N9N2+eBCq6zTub
RZ+tN1t/irWLcCCx3QfOma9S4pk+EzxoT6iuPCxiLpBdfpRib4TuzKNFMEMwEgYD
VR0TAQH/BAgwBgEB/wIBADAOBgNVHQ8BAf8EBAMCAQYwHQYDVR0OBBYEFBjwVQEt
WsRnuv4NGkZiz4+t9FMgMAoGCCqGSM49BAMCA0gAMEUCIQDoiIwjr4scdL2URkH+
nEjmJORyMV9iPSxwNADYvpmOHgIgRsTQA2MuEu60ArHQVgVOBg8huHELIFr4Wi7E
OY0bS1Q=
-----END CERTIFICATE-----
"""
