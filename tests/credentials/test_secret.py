"""A join token from the environment, or from a file that it names."""

from pathlib import Path

import pytest

from shardnet.cli.protection import Protection
from shardnet.credentials import find_token
from shardnet.credentials.token import new_token
from shardnet.errors import CredentialsError
from shardnet.settings import Settings

MEETING = {"SHARDNET_RENDEZVOUS": "10.0.0.1:7000", "SHARDNET_WORLD_SIZE": "2"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "token"


def test_none() -> None:
    assert find_token({"SHARDNET_TOKEN_FILE": ""}) == ""


def test_a_file_is_as_good_as_the_variable(file: Path) -> None:
    token = new_token()
    file.write_text(f"{token}\n")  # as `shardnet certs token` prints it
    assert find_token({"SHARDNET_TOKEN_FILE": str(file)}) == find_token({"SHARDNET_TOKEN": token}) == token
    assert Settings.from_environment(MEETING | {"SHARDNET_TOKEN_FILE": str(file)}).token == token


def test_what_the_program_gives_comes_first(file: Path) -> None:
    token = new_token()
    assert Settings.from_environment(MEETING | {"SHARDNET_TOKEN_FILE": str(file)}, token=token).token == token


@pytest.mark.parametrize("content", [None, b"", b"\n", b"\xff"])
def test_a_file_of_no_use_is_named(file: Path, content: bytes | None) -> None:
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(CredentialsError, match=str(file)):
        find_token({"SHARDNET_TOKEN_FILE": str(file)})


def test_two_are_one_too_many(file: Path) -> None:
    with pytest.raises(CredentialsError, match="are both set"):
        find_token({"SHARDNET_TOKEN_FILE": str(file), "SHARDNET_TOKEN": new_token()})


def test_workers_are_given_what_was_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They do not also get the file's name, which would be a second source."""
    file.write_text(new_token())
    monkeypatch.setenv("SHARDNET_TOKEN_FILE", str(file))
    environment = Protection(token=find_token({"SHARDNET_TOKEN_FILE": str(file)})).environment
    assert find_token({"SHARDNET_TOKEN_FILE": str(file)} | environment) == file.read_text()
