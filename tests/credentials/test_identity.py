"""Who a certificate says that its holder is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardnet.credentials import Identity, Role
from shardnet.errors import CredentialsError
from tests.credentials.made import credentials

names = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1, max_size=128)


@given(names, st.none() | names)
def test_a_uri_and_back(name: str, job: str | None) -> None:
    """Also with names that look like parts of one."""
    for identity in (Identity(Role.WORKER, name, job), Identity(Role.OPERATOR, name)):
        assert Identity.parse(identity.uri) == identity
        assert identity.uri.isascii()


def test_a_job_called_star_is_not_any_job() -> None:
    identity = Identity.parse(Identity(Role.WORKER, "n", "*").uri)
    assert identity.job == "*"
    assert not identity.may_join("lm")


@pytest.mark.parametrize(
    ("identity", "jobs"),
    [
        (Identity(Role.WORKER, "n", "lm"), {"lm"}),
        (Identity(Role.WORKER, "n"), {"lm", "other"}),
        (Identity(Role.OPERATOR, "n"), set()),
        (Identity(Role.RENDEZVOUS, "n"), set()),
    ],
)
def test_which_jobs_it_may_join(identity: Identity, jobs: set[str]) -> None:
    assert {job for job in ("lm", "other") if identity.may_join(job)} == jobs


@pytest.mark.parametrize(
    "uri",
    [
        *("", "shardnet", "shardnet:worker:lm", "shardnet:worker:a:b:c", "shardnet:king:a", "spiffe:worker:a:b", "shardnet:operator:a:b"),
        *("shardnet:worker:lm:", "shardnet:worker::n", "shardnet:worker:l%6d:n", "shardnet:operator:%0a"),
    ],
)
def test_what_is_no_identity(uri: str) -> None:
    """The last but one is a second spelling of an identity; compared as text it would be another identity."""
    with pytest.raises(CredentialsError):
        Identity.parse(uri)


@pytest.mark.parametrize("uris", [[], ["https://example.org"], ["shardnet:operator:a", "shardnet:operator:b"]])
def test_a_certificate_names_one(uris: list[str]) -> None:
    with pytest.raises(CredentialsError, match=r"must name exactly one shardnet identity, but it names [02]"):
        Identity.of_uris(["https://example.org", *uris])


def test_only_workers_belong_to_jobs() -> None:
    with pytest.raises(CredentialsError, match="cannot name a job"):
        Identity(Role.OPERATOR, "a", "lm")


def test_in_words_and_without_the_key() -> None:
    assert str(Identity(Role.WORKER, "node-0", "lm")) == "worker 'node-0' of job 'lm'"
    assert repr(credentials()) == "Credentials(worker 'node-0' of any job)"
