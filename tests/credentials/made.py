"""Certificates for tests, from one authority and from another that nobody trusts."""

from functools import cache

from shardnet.credentials import Credentials, Identity, Role, Security
from shardnet.credentials.authority import Authority


def authority(name: str = "the cluster's") -> Authority:
    """One authority per name; they differ only in the key."""
    return _authority(name)


@cache
def _authority(_: str) -> Authority:
    return Authority.create()


@cache
def credentials(name: str = "node-0", role: Role = Role.WORKER, *, job: str | None = None, by: str = "the cluster's") -> Credentials:
    return authority(by).issue(Identity(role, name, job))


def security(name: str = "node-0", role: Role = Role.WORKER, *, job: str | None = None, by: str = "the cluster's") -> Security:
    return Security(credentials=credentials(name, role, job=job, by=by))
