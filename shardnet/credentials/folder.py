"""Certificates as files: one folder for the authority, and in it one for everyone who has a certificate.

cluster/authority.pem       the authority's certificate
cluster/authority.key       its key: who has it can make any certificate, so it stays where it was made
cluster/NAME/authority.pem  what one machine or person needs: copy this folder to where it is used
cluster/NAME/certificate.pem
cluster/NAME/key.pem
"""

import os
from pathlib import Path

from shardnet.credentials.authority import Authority, check, key_pem
from shardnet.credentials.bundle import Credentials
from shardnet.errors import CredentialsError

AUTHORITY, AUTHORITY_KEY = "authority.pem", "authority.key"
CERTIFICATE, KEY = "certificate.pem", "key.pem"


def load(folder: str | Path) -> Credentials:
    """The credentials in a folder. Raises CredentialsError naming the file and what to do."""
    folder = Path(folder)
    authority, certificate, key = (_read(folder / name, "issue") for name in (AUTHORITY, CERTIFICATE, KEY))
    try:
        return Credentials(check(authority, certificate, key), authority, certificate, key)
    except CredentialsError as error:
        raise CredentialsError(f"{folder}: {error}") from None
    except (ValueError, TypeError) as error:
        raise CredentialsError(f"{folder} has files that are no certificate or key in PEM form: {error}") from error


def save(credentials: Credentials, folder: str | Path) -> None:
    """Write them, the key for its owner only. Raises CredentialsError where they cannot be written; nothing is overwritten."""
    folder = Path(folder)
    _make(folder)
    _write(folder / AUTHORITY, credentials.authority)
    _write(folder / CERTIFICATE, credentials.certificate)
    _write(folder / KEY, credentials.key, private=True)


def load_authority(folder: str | Path) -> Authority:
    """Raises CredentialsError naming the file and what to do."""
    folder = Path(folder)
    certificate, key = (_read(folder / name, "init") for name in (AUTHORITY, AUTHORITY_KEY))
    try:
        return Authority.load(certificate, key)
    except ValueError as error:
        raise CredentialsError(f"{folder} has files that are no certificate or key in PEM form: {error}") from error


def save_authority(authority: Authority, folder: str | Path) -> None:
    """Write it, the key for its owner only. Raises CredentialsError where it cannot be written; nothing is overwritten."""
    folder = Path(folder)
    _make(folder)
    _write(folder / AUTHORITY, authority.pem)
    _write(folder / AUTHORITY_KEY, key_pem(authority.key), private=True)


def _read(path: Path, command: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CredentialsError(f"cannot read {path}: {error.strerror}; `shardnet certs {command}` makes it") from error


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CredentialsError(f"cannot make the folder {folder}: {error.strerror}") from error


def _write(path: Path, content: bytes, *, private: bool = False) -> None:
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o644), "wb") as file:
            file.write(content)
    except FileExistsError:
        raise CredentialsError(f"{path} exists, and whoever uses it would lose it; remove it first, or choose another name") from None
    except OSError as error:
        raise CredentialsError(f"cannot write {path}: {error.strerror}") from error
