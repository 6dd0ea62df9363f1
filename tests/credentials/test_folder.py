"""Certificates as files: what is written, and the errors about files that cannot be used."""

import os
import ssl
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat

from shardnet.credentials import Identity, Role, Security
from shardnet.credentials.authority import Authority, key_pem
from shardnet.credentials.folder import load, load_authority, save, save_authority
from shardnet.errors import CredentialsError
from tests.credentials.made import authority, credentials

NOBODY = 65534


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(credentials(job="lm"), tmp_path / "node-0")
    return tmp_path / "node-0"


def test_there_and_back(folder: Path) -> None:
    assert load(folder) == credentials(job="lm")
    assert Security.find(Role.WORKER, certs=str(folder)).credentials == credentials(job="lm")


def test_an_authority_there_and_back(tmp_path: Path) -> None:
    save_authority(authority(), tmp_path / "cluster")
    again = load_authority(tmp_path / "cluster")
    save(again.issue(Identity(Role.OPERATOR, "me"), hosts=["10.0.0.1", "example.org"]), tmp_path / "cluster/me")
    assert load(tmp_path / "cluster/me").authority == credentials().authority


def test_keys_are_for_their_owner(folder: Path, tmp_path: Path) -> None:
    save_authority(authority(), tmp_path)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (*folder.iterdir(), tmp_path / "authority.key")}
    assert {name for name, mode in modes.items() if mode == 0o600} == {"key.pem", "authority.key"}


def test_nothing_is_overwritten(folder: Path) -> None:
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(CredentialsError, match=r"authority\.pem exists and is never overwritten"):
        save(credentials("another"), folder)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def remove(folder: Path) -> None:
    (folder / "key.pem").unlink()


def damage(folder: Path) -> None:
    (folder / "certificate.pem").write_bytes(b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")


def empty(folder: Path) -> None:
    (folder / "key.pem").write_bytes(b"")


def protect(folder: Path) -> None:
    key, password = ec.generate_private_key(ec.SECP256R1()), BestAvailableEncryption(b"secret")
    (folder / "key.pem").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, password))


def take_another_key(folder: Path) -> None:
    (folder / "key.pem").write_bytes(credentials("another").key)


def take_another_authority(folder: Path) -> None:
    (folder / "authority.pem").write_bytes(authority("another").pem)


def expire(folder: Path) -> None:
    reissue(folder, -0.01)


def come_from_the_future(folder: Path) -> None:
    reissue(folder, 30.0, later=timedelta(days=2))


def reissue(folder: Path, days: float, later: timedelta = timedelta(0)) -> None:
    """A certificate of the authority, valid since a while ago, or from `later` on."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier("shardnet:operator:x")])
    certificate = (
        x509.CertificateBuilder(authority().certificate.subject, x509.Name([]), key.public_key(), 1)
        .not_valid_before(now - timedelta(days=1) + later)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(names, critical=False)
        .sign(authority().key, hashes.SHA256())
    )
    (folder / "certificate.pem").write_bytes(certificate.public_bytes(Encoding.PEM))
    (folder / "key.pem").write_bytes(key_pem(key))


def let_the_authority_expire(folder: Path) -> None:
    new = Authority.create()
    old, issued = Authority.create(new.key, days=-0.01), new.issue(Identity(Role.WORKER, "n"))
    for name, content in (("authority.pem", old.pem), ("certificate.pem", issued.certificate), ("key.pem", issued.key)):
        (folder / name).write_bytes(content)


@pytest.mark.parametrize(
    ("harm", "text"),
    [
        (remove, r"cannot read .*key\.pem: No such file or directory; make it with `shardnet certs issue`"),
        (damage, "not a certificate or key in PEM form"),
        (empty, "not a certificate or key in PEM form"),
        (protect, "or the key has a password"),
        (take_another_key, "the key does not belong to the certificate"),
        (take_another_authority, "the certificate was not issued by the authority beside it"),
        (expire, r"the certificate has expired on .* UTC; issue another with `shardnet certs issue`"),
        (come_from_the_future, r"the certificate is not valid before .* UTC; check this machine's clock"),
        (let_the_authority_expire, r"the authority has expired on .* UTC; make a new one"),
    ],
)
def test_what_cannot_be_used_is_said(folder: Path, harm: Callable[[Path], None], text: str) -> None:
    harm(folder)
    with pytest.raises(CredentialsError, match=text) as caught:
        load(folder)
    assert str(folder) in str(caught.value)


@contextmanager
def unprivileged() -> Iterator[None]:
    """Be a user whom modes of files concern: they do not concern root."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if before == 0:
            os.seteuid(before)


@pytest.mark.parametrize("closed", ["key.pem", "."])
def test_a_file_of_another_user_is_not_to_be_made_again(folder: Path, closed: str) -> None:
    (folder / closed).chmod(0)
    with unprivileged(), pytest.raises(CredentialsError, match=r"cannot read .*\.pem: Permission denied; it, and its folder") as caught:
        load(folder)
    (folder / closed).chmod(0o700)
    assert "make it" not in str(caught.value)


def test_what_else_stands_in_a_file_does_not_count(folder: Path) -> None:
    """`openssl x509 -text` adds text for people, and not only ASCII."""
    path = folder / "authority.pem"
    path.write_bytes("Aussteller: für alle\n".encode() + path.read_bytes())
    assert load(folder) == credentials(job="lm")
    for context in (load(folder).accepting, load(folder).calling):
        assert context.verify_mode is ssl.CERT_REQUIRED


def test_an_authority_of_two_halves(tmp_path: Path) -> None:
    save_authority(authority(), tmp_path)
    (tmp_path / "authority.key").write_bytes(key_pem(authority("another").key))
    with pytest.raises(CredentialsError, match="the key does not belong to the certificate of the authority"):
        load_authority(tmp_path)


def test_all_files_or_none(tmp_path: Path) -> None:
    (tmp_path / "key.pem").write_text("in the way")
    with pytest.raises(CredentialsError, match=r"key\.pem exists"):
        save(credentials(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["key.pem"]


@pytest.mark.parametrize("host", ["rendezvous.shardnet", "x.Shardnet", "*.shardnet", "rendezvous.shardnet.", "*"])
def test_a_host_name_gives_no_role(host: str) -> None:
    """grpcio knows a rendezvous by such a name."""
    with pytest.raises(CredentialsError, match=r"host names must not contain \* or end in \.shardnet"):
        authority().issue(Identity(Role.WORKER, "n"), hosts=[host])


def test_nothing_outlives_its_authority() -> None:
    with pytest.raises(CredentialsError, match=r"the authority itself expires on .*; choose fewer --days"):
        authority().issue(Identity(Role.WORKER, "n"), days=4000)
    with pytest.raises(CredentialsError, match="the authority itself expires on"):
        Authority.create(days=-0.01).issue(Identity(Role.WORKER, "n"))


def test_one_protection_is_enough(folder: Path) -> None:
    with pytest.raises(CredentialsError, match="more than one is given of"):
        Security.find(Role.WORKER, certs=str(folder), insecure=True)
    with pytest.raises(CredentialsError, match="more than one is given of"):
        Security.find(Role.WORKER, certs=str(folder), token="x")
