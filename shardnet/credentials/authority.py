"""`Authority`: makes certificates of one cluster, and checks them."""

import ipaddress
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Self

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID

from shardnet.credentials.bundle import ANYONE, RENDEZVOUS, Credentials
from shardnet.credentials.identity import Identity, Role
from shardnet.errors import CredentialsError

AUTHORITY_DAYS = 3650
_OURS = ".shardnet"  # the end of ANYONE and RENDEZVOUS
_EARLIER = timedelta(hours=1)  # clocks of a cluster differ
_CURVE = ec.SECP256R1()  # every TLS library has it; grpcio's does not accept Ed25519 certificates
_USAGES = (  # a certificate must allow or deny each of these by name (RFC 5280, section 4.2.1.3)
    *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
    *("key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
)


class Authority:
    """A key that signs certificates, and its own certificate, which all processes trust."""

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self.certificate = certificate
        self.key = key

    @classmethod
    def create(cls, key: ec.EllipticCurvePrivateKey | None = None, *, days: float = AUTHORITY_DAYS) -> Self:
        """Make an authority whose own certificate is valid for `days`. `key`: default, a new one."""
        key = key or ec.generate_private_key(_CURVE)
        name = _name("shardnet authority")
        certificate = (
            _builder(name, key.public_key(), days)
            .issuer_name(name)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage("key_cert_sign", "crl_sign"), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        return cls(certificate, key)

    @classmethod
    def of_secret(cls, number: int) -> Self:
        """The authority whose key is derived from a number: the same key wherever it is made."""
        order = int("ffffffff00000000ffffffffffffffffbce6faada7179e84f3b9cac2fc632551", 16)  # of P-256 (NIST SP 800-186)
        return cls.create(ec.derive_private_key(number % (order - 1) + 1, _CURVE))

    @classmethod
    def load(cls, certificate: bytes, key: bytes) -> Self:
        """Raises CredentialsError if these are not the certificate and key of one of our authorities."""
        with _readable():
            private, own = serialization.load_pem_private_key(key, None), x509.load_pem_x509_certificate(certificate)
            if not isinstance(private, ec.EllipticCurvePrivateKey) or private.public_key() != own.public_key():
                raise CredentialsError(
                    "the key does not belong to the certificate of the authority; both must be from the same `shardnet certs init`"
                )
        return cls(own, private)

    def issue(self, identity: Identity, *, days: float = 365.0, hosts: Iterable[str] = ()) -> Credentials:
        """Make a new key and its certificate. `hosts`: host names and addresses that it also names, for tools that compare them.

        Raises CredentialsError for claims that the authority may not make, ValueError or OverflowError for values that no certificate
        can hold.
        """
        hosts = list(hosts)
        if any("*" in host or host.rstrip(".").lower().endswith(_OURS) for host in hosts):  # grpcio compares without the last dot
            raise CredentialsError(
                f"host names must not contain * or end in {_OURS}, because names with this ending state the role of a "
                "process; choose other hosts"
            )
        last = self.certificate.not_valid_after_utc
        if datetime.now(UTC) + timedelta(days=days) > last:
            raise CredentialsError(
                f"the authority itself expires on {last:%Y-%m-%d}; choose fewer --days, or make a new authority with `shardnet certs init`"
            )
        key = ec.generate_private_key(_CURVE)
        names = [ANYONE, *((RENDEZVOUS,) if identity.role is Role.RENDEZVOUS else ())]
        alternatives = [x509.UniformResourceIdentifier(identity.uri), *map(x509.DNSName, names), *map(_host, hosts)]
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
        certificate = (
            _builder(_name(identity.name), key.public_key(), days)
            .issuer_name(self.certificate.subject)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage("digital_signature"), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages if identity.role is not Role.OPERATOR else usages[:1]), critical=False)
            .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False)
            .sign(self.key, hashes.SHA256())
        )
        return Credentials(identity, self.pem, _pem(certificate), key_pem(key))

    @property
    def pem(self) -> bytes:
        """The certificate as PEM."""
        return _pem(self.certificate)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def key_pem(key: PrivateKeyTypes) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def expiry(certificate: bytes) -> datetime:
    """The time until which a certificate is valid."""
    return x509.load_pem_x509_certificate(certificate).not_valid_after_utc


def check(authority: bytes, certificate: bytes, key: bytes) -> Credentials:
    """Credentials from these PEM texts, without anything else in them. Raises CredentialsError, saying what to do, for texts that
    cannot be read, do not belong together, or are out of date."""
    with _readable():
        trusted, own = x509.load_pem_x509_certificate(authority), x509.load_pem_x509_certificate(certificate)
        private = serialization.load_pem_private_key(key, None)
        if private.public_key() != own.public_key():
            raise CredentialsError(
                "the key does not belong to the certificate; copy both from one folder that `shardnet certs issue` has made"
            )
    try:
        own.verify_directly_issued_by(trusted)
    except (ValueError, TypeError, InvalidSignature):
        raise CredentialsError(
            "the certificate was not issued by the authority beside it; copy both from one folder that `shardnet certs issue` has made"
        ) from None
    now = datetime.now(UTC)
    for what, each in (("certificate", own), ("authority", trusted)):
        if now >= each.not_valid_after_utc:
            raise CredentialsError(
                f"the {what} has expired on {each.not_valid_after_utc:%Y-%m-%d %H:%M} UTC; {_REMEDY[what]}, or check this machine's clock"
            )
        if now < each.not_valid_before_utc:
            raise CredentialsError(
                f"the {what} is not valid before {each.not_valid_before_utc:%Y-%m-%d %H:%M} UTC; check this machine's clock"
            )
    try:
        names = own.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        raise CredentialsError("the certificate names no shardnet identity; make one with `shardnet certs issue`") from None
    identity = Identity.of_uris(names.get_values_for_type(x509.UniformResourceIdentifier))
    return Credentials(identity, _pem(trusted), _pem(own), key_pem(private))


@contextmanager
def _readable() -> Iterator[None]:
    """Raise errors from reading PEM texts as CredentialsError."""
    try:
        yield
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        if isinstance(error, CredentialsError):
            raise
        raise CredentialsError(f"a file is not a certificate or key in PEM form, or the key has a password: {error}") from error


_REMEDY = {
    "certificate": "issue another with `shardnet certs issue`",
    "authority": "make a new one with `shardnet certs init`, and issue all certificates again",
}


def _builder(name: x509.Name, key: ec.EllipticCurvePublicKey, days: float) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLIER)
        .not_valid_after(now + timedelta(days=days))
    )


def _name(text: str) -> x509.Name:
    """A subject name for people to read; the identity is in the URI."""
    text = text.encode()[:64].decode(errors="ignore")  # as long as it may be (RFC 5280, appendix A)
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])


def _usage(*allowed: str) -> x509.KeyUsage:
    return x509.KeyUsage(**{usage: usage in allowed for usage in _USAGES})


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)
