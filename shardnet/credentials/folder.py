"""Certificates as files: one folder for the authority, and in it one folder for each holder of a certificate.

cluster/authority.pem       the authority's certificate
cluster/authority.key       its key: whoever has it can make any certificate, so it stays where it was made
cluster/NAME/authority.pem  the files that one machine or person needs: copy this folder to where it is used
cluster/NAME/certificate.pem
cluster/NAME/key.pem
"""

import os
from contextlib import ExitStack
from pathlib import Path

from shardnet.credentials.authority import Authority, check, key_pem
from shardnet.credentials.bundle import Credentials
from shardnet.errors import CredentialsError

AUTHORITY, AUTHORITY_KEY = "authority.pem", "authority.key"
CERTIFICATE, KEY = "certificate.pem", "key.pem"
_PRIVATE = {AUTHORITY_KEY, KEY}


def load(folder: str | Path) -> Credentials:
    """The credentials in a folder. Raises CredentialsError naming the file and what to do."""
    folder = Path(folder)
    if os.path.exists(folder / AUTHORITY_KEY) and not os.path.exists(folder / CERTIFICATE):  # noqa: PTH110 - Path's raise for a closed folder
        raise CredentialsError(
            f"{folder} is the folder of an authority; name the folder of one certificate in it, such as {folder / 'rendezvous'}, "
            f"or make one with `shardnet certs issue {folder} NAME`"
        )
    authority, certificate, key = (_read(folder / name, "issue") for name in (AUTHORITY, CERTIFICATE, KEY))
    try:
        return check(authority, certificate, key)
    except CredentialsError as error:
        raise CredentialsError(f"{folder}: {error}") from None


def save(credentials: Credentials, folder: str | Path) -> None:
    """Write them, the key readable only by its owner. Raises CredentialsError if they cannot be written; nothing is overwritten."""
    _write(Path(folder), {AUTHORITY: credentials.authority, CERTIFICATE: credentials.certificate, KEY: credentials.key})


def load_authority(folder: str | Path) -> Authority:
    """Raises CredentialsError naming the file and what to do."""
    folder = Path(folder)
    certificate, key = (_read(folder / name, "init") for name in (AUTHORITY, AUTHORITY_KEY))
    try:
        return Authority.load(certificate, key)
    except CredentialsError as error:
        raise CredentialsError(f"{folder}: {error}") from None


def save_authority(authority: Authority, folder: str | Path) -> None:
    """Write it, the key readable only by its owner. Raises CredentialsError if it cannot be written; nothing is overwritten."""
    _write(Path(folder), {AUTHORITY: authority.pem, AUTHORITY_KEY: key_pem(authority.key)})


def _read(path: Path, command: str) -> bytes:
    try:
        return path.read_bytes()
    except PermissionError as error:  # a new one would not help; a new authority would even put all machines out of the cluster
        advice = f"it, and its folder, must be readable by the user who runs this (uid {os.geteuid()})"
        raise CredentialsError(f"cannot read {path}: {error.strerror}; {advice}") from error
    except OSError as error:
        raise CredentialsError(f"cannot read {path}: {error.strerror}; make it with `shardnet certs {command}`") from error


def _write(folder: Path, files: dict[str, bytes]) -> None:
    """Write all of the files or, if anything goes wrong, none."""
    with ExitStack() as undo:
        try:
            folder.mkdir(mode=0o755, parents=True, exist_ok=True)
            for name, content in files.items():
                path = folder / name
                mode = 0o600 if name in _PRIVATE else 0o644
                with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                    undo.callback(path.unlink)
                    file.write(content)
        except FileExistsError as error:
            raise CredentialsError(f"{error.filename} exists and is never overwritten; remove the file, or choose another name") from None
        except OSError as error:
            raise CredentialsError(f"cannot write {error.filename or folder}: {error.strerror}") from error
        undo.pop_all()
