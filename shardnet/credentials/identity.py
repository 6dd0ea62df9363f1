"""`Identity`: the identity that a certificate gives its holder."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self
from urllib.parse import quote, unquote

from shardnet.errors import CredentialsError

ANONYMOUS = "token/"  # the beginning of the name of a process that has made its certificate itself, with a join token
DOCTOR = ".doctor"  # with this ending a job's name is that of the job in which `shardnet doctor` examines that job's machines
_SCHEME = "shardnet"
_ANY = "*"  # quoting never writes it bare, so that no job's name can be taken for it


class Role(StrEnum):
    """What the holder of a certificate may do, besides asking any process for health and statistics."""

    WORKER = "worker"  # join its job, and take part in its collectives
    RENDEZVOUS = "rendezvous"  # place workers
    OPERATOR = "operator"  # nothing more


@dataclass(frozen=True, slots=True)
class Identity:
    """A name in a role. Raises CredentialsError at construction for an impossible name or job.

    name  for a worker that of its machine: all workers of a machine have one certificate
    job   the job that a worker may join; None: any
    """

    role: Role
    name: str
    job: str | None = None

    def __post_init__(self) -> None:
        for what, text in (("name", self.name), ("job", "-" if self.job is None else self.job)):
            if not text or not text.isprintable() or len(text) > 128:
                raise CredentialsError(f"the {what} of a certificate must be 1 to 128 printable characters, got {text!r}")
        if self.job is not None and self.role is not Role.WORKER:
            raise CredentialsError(f"a certificate for a {self.role} cannot name a job; only one for a worker can")

    @property
    def uri(self) -> str:
        """The identity as text, as certificates contain it and members compare it."""
        job = () if self.role is not Role.WORKER else (_ANY if self.job is None else quote(self.job, safe=""),)
        return ":".join((_SCHEME, self.role, *job, quote(self.name, safe="")))

    @property
    def is_anonymous(self) -> bool:
        """Whether it says nothing about the machine."""
        return self.name.startswith(ANONYMOUS)

    def may_join(self, job: str) -> bool:
        """Whether it may join a job: a worker may join its own one, and the one in which `shardnet doctor` examines that job's machines."""
        return self.role is Role.WORKER and (self.job is None or job in (self.job, self.job + DOCTOR))

    @classmethod
    def parse(cls, uri: str) -> Self:
        """Raises CredentialsError for a URI that is not one of ours."""
        match uri.split(":"):
            case [scheme, Role.WORKER, job, name] if scheme == _SCHEME:
                found = cls(Role.WORKER, unquote(name), None if job == _ANY else unquote(job))
            case [scheme, (Role.RENDEZVOUS | Role.OPERATOR) as role, name] if scheme == _SCHEME:
                found = cls(Role(role), unquote(name))
            case _:
                raise CredentialsError(f"{uri!r} is not a shardnet identity")
        if found.uri != uri:  # in comparisons two spellings of one identity would be two identities
            raise CredentialsError(f"{uri!r} is not how shardnet writes the identity of {found}")
        return found

    @classmethod
    def of_peer(cls, certificate: Mapping[str, Any] | None) -> Self:
        """The identity in a peer's certificate as `ssl` returns it after verification. Raises CredentialsError."""
        names = (certificate or {}).get("subjectAltName", ())
        return cls.of_uris([name for kind, name in names if kind == "URI"])

    @classmethod
    def of_uris(cls, uris: list[str]) -> Self:
        """The identity in a certificate's URIs. Raises CredentialsError unless exactly one of them is ours."""
        ours = [uri for uri in uris if uri.startswith(f"{_SCHEME}:")]
        if len(ours) != 1:
            raise CredentialsError(f"the certificate must name exactly one shardnet identity, but it names {len(ours)}")
        return cls.parse(ours[0])

    def __str__(self) -> str:
        """For example: worker 'node-0' of job 'lm'."""
        of = "" if self.role is not Role.WORKER else " of any job" if self.job is None else f" of job {self.job!r}"
        return f"{self.role} {self.name!r}{of}"
