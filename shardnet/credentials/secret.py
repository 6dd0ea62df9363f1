"""Where a process finds its join token: SHARDNET_TOKEN, or the file that SHARDNET_TOKEN_FILE names.

Containers get secrets as files. A file does not show in `docker inspect`, and a process that is started beside this one, such as a health
check, finds it, too.
"""

from collections.abc import Mapping
from pathlib import Path

from shardnet.errors import CredentialsError

TOKEN = "SHARDNET_TOKEN"
TOKEN_FILE = "SHARDNET_TOKEN_FILE"


def find_token(environment: Mapping[str, str]) -> str:
    """Empty if neither is set. Raises CredentialsError for both at once, and for a file that cannot be read or is empty."""
    token, file = environment.get(TOKEN, ""), environment.get(TOKEN_FILE, "")
    if not file:
        return token
    if token:
        raise CredentialsError(f"{TOKEN} and {TOKEN_FILE} are both set; unset one of them")
    try:
        token = Path(file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CredentialsError(f"cannot read the join token in {file} ({TOKEN_FILE}): {error}") from error
    if not token:
        raise CredentialsError(f"{file} ({TOKEN_FILE}) is empty; `shardnet certs token > {file}` writes a join token")
    return token
