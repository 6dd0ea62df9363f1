"""The credentials with which this machine proves its identity."""

import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509

from shardnet.credentials import Role, Security
from shardnet.credentials.folder import KEY
from shardnet.doctor.finding import Finding, ok, problem, warning
from shardnet.errors import CredentialsError

SOON = timedelta(days=14)
_OTHER_JOB = "make one that does with `shardnet certs issue --job`, or use another folder"
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def about_trust(*, insecure: bool, certs: str, token: str, job: str | None = None) -> list[Finding]:
    """Check the protection that a user gives; at most one of the three is given. `job`: the job that workers will join; None: the one
    that the certificate names, if it names one."""
    try:
        security = Security.find(Role.WORKER, insecure=insecure, certs=certs, token=token)
    except CredentialsError as error:
        return [problem("trust", str(error))]
    if security.credentials is None:
        return [_plaintext(insecure)]
    if not certs:
        return [ok("trust", "a join token: all connections are encrypted, and whoever has the token may take part")]
    identity = security.credentials.identity
    found = [_certificate(certs, security.credentials.certificate, str(identity)), _key(Path(certs) / KEY)]
    if job is not None and not identity.may_join(job):
        found.append(problem("trust", f"this certificate lets no worker join job {job!r}", _OTHER_JOB))
    return found


def _plaintext(insecure: bool) -> Finding:
    if insecure:
        return warning(
            "trust",
            "connections are not encrypted, and whoever reaches a port can read and alter the training",
            "make certificates with `shardnet certs`, or use a join token; see docs/security.md",
        )
    return ok("trust", "none, which is enough on this machine; connections to other machines need --certs, SHARDNET_TOKEN or --insecure")


def _certificate(folder: str, pem: bytes, identity: str) -> Finding:
    until = x509.load_pem_x509_certificate(pem).not_valid_after_utc
    what = f"{folder}: a certificate for {identity}, until {until:%Y-%m-%d}"
    if until - datetime.now(UTC) < SOON:
        return warning("trust", what, "it expires soon: make a new one with `shardnet certs issue`")
    return ok("trust", what)


def _key(path: Path) -> Finding:
    mode = path.stat().st_mode
    if mode & _OTHERS:
        return warning(
            "trust", f"{path} can be read by others (mode {mode & 0o777:o})", f"whoever reads it can act as this machine: chmod 600 {path}"
        )
    return ok("trust", f"only its owner has access to {path}")
