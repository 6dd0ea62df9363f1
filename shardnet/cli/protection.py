"""`Protection`: the user's choice of how connections are protected."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from shardnet.cli import arguments
from shardnet.credentials import Role, Security, find_token
from shardnet.variables import flag


@dataclass(frozen=True, slots=True)
class Protection:
    """At most one of the fields is set.

    insecure  unencrypted connections to and from other machines are allowed
    certs     folder with certificates
    token     join token
    """

    insecure: bool = False
    certs: str = ""
    token: str = field(default="", repr=False)

    @staticmethod
    def add_to(parser: arguments.Parser) -> None:
        """Add the options."""
        parser.add_argument(
            "--certs",
            type=Path,
            default=os.environ.get("SHARDNET_CERTS") or None,
            metavar="DIR",
            help="folder with a certificate, made by 'shardnet certs': encrypts all connections, and admits only processes with a "
            "certificate of this cluster (default: $SHARDNET_CERTS); instead, all processes may be given the same $SHARDNET_TOKEN, from "
            "'shardnet certs token', or $SHARDNET_TOKEN_FILE, a file that holds it",
        )
        parser.add_argument(
            "--insecure",
            action="store_true",
            help="allow unencrypted connections to and from other machines (default: $SHARDNET_INSECURE, 1 for on or 0 for off; "
            "off if it is not set)",
        )

    @classmethod
    def of(cls, options: arguments.Arguments) -> Self:
        """Read it from the command line and the environment.

        Raises UsageError for a SHARDNET_INSECURE that is neither 0 nor 1, and CredentialsError for a token that cannot be read.
        """
        certs = "" if options.certs is None else str(options.certs.absolute())
        return cls(options.insecure or flag(os.environ, "SHARDNET_INSECURE"), certs, find_token(os.environ))

    def security(self, role: Role) -> Security:
        """Raises CredentialsError for credentials that cannot be used."""
        return Security.find(role, insecure=self.insecure, certs=self.certs, token=self.token)

    def on_this_machine(self) -> "Protection":
        """The protection for a run with a rendezvous of its own. A machine's certificate is not valid for a rendezvous, so such a run has
        a token of its own."""
        if not self.certs:
            return self
        from shardnet.credentials.token import new_token  # costs 0.1 s, so only if it is needed

        return Protection(token=new_token())

    @property
    def settings(self) -> dict[str, bool | str]:
        """As settings of `connect`."""
        return {"insecure": self.insecure, "certs": self.certs, "token": self.token}

    @property
    def environment(self) -> dict[str, str]:
        """As environment variables for a worker. All are set, so that inherited ones do not count."""
        return {
            "SHARDNET_INSECURE": str(int(self.insecure)),
            "SHARDNET_CERTS": self.certs,
            "SHARDNET_TOKEN": self.token,
            "SHARDNET_TOKEN_FILE": "",
        }

    @property
    def flags(self) -> str:
        """The options that others need to reach this process, as text for messages."""
        return " --insecure" if self.insecure else " --certs DIR" if self.certs else ""


NO_PROTECTION = Protection()  # plaintext that does not leave this machine
