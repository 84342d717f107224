"""A run's certificate authority, which certifies the keys of the coordinator and the nodes.

All keys are ECDSA P-256. A node's request contributes only the public key to its certificate. Certificates
are valid from an hour before they are issued, for machines whose clock is slow.
"""

import hashlib
import ipaddress
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from wire.errors import UserError
from wire.identity.files import make_private_directory, write_private
from wire.identity.names import (
    JOIN_NAME,
    control_server_name,
    coordinator_server_name,
    is_run_id,
    node_server_name,
    session_server_name,
)

BACKDATE = timedelta(hours=1)
AUTHORITY_LIFETIME = timedelta(days=3650)

# An extension of the coordinator's certificate that holds the issuer's certificate in DER. A client with the
# standard `ssl` module sees only the leaf, but must compare the issuer with its token's pin. Anyone may use
# the UUID arc (2.25). BoringSSL skips the extension because it is not critical.
ISSUER_CERTIFICATE_OID = x509.ObjectIdentifier("2.25.112806441529468240917371532706210931867")

_KEY_FILE, _CERTIFICATE_FILE = "ca.key", "ca.pem"
_CA_COMMON_NAME = "thinwire run "


def public_key_hash(key: ec.EllipticCurvePublicKey) -> bytes:
    """SHA-256 of the key's SubjectPublicKeyInfo: 32 bytes that identify the key everywhere in thinwire."""
    return hashlib.sha256(
        key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    ).digest()


def certificate_pin(certificate: x509.Certificate) -> bytes:
    """`public_key_hash` for a certificate's key of any kind."""
    spki = certificate.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return hashlib.sha256(spki).digest()


def key_to_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """The key in PKCS #8, unencrypted because the file's mode protects it."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def certificate_to_pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def read_certificate(data: bytes) -> x509.Certificate:
    """A certificate in PEM or DER; ValueError for anything else."""
    is_pem = data.lstrip().startswith(b"-----BEGIN")
    with _only_value_errors():
        return x509.load_pem_x509_certificate(data) if is_pem else x509.load_der_x509_certificate(data)


def csr_public_key(csr_der: bytes) -> ec.EllipticCurvePublicKey:
    """The P-256 key of a certificate request signed by that key; ValueError for anything else."""
    with _only_value_errors():
        request = x509.load_der_x509_csr(csr_der)
        key, sound = request.public_key(), request.is_signature_valid
    if not sound:
        raise ValueError("it is not signed by its own key")
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ValueError("its key is not on P-256")
    return key


@contextmanager
def _only_value_errors() -> Iterator[None]:
    """Turn the library's own errors into ValueError."""
    try:
        yield
    except (UnsupportedAlgorithm, x509.InvalidVersion) as error:
        raise ValueError(str(error)) from None


def authority_run_id(certificate: x509.Certificate) -> str | None:
    """The run id in a CA's certificate; None if there is none."""
    try:
        names = [name.value for name in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    except ValueError:  # parsed only now, and may not be text
        return None
    run_id = str(names[0]).removeprefix(_CA_COMMON_NAME) if len(names) == 1 else ""
    return run_id if is_run_id(run_id) else None


def is_issued_by(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    """Whether `issuer`'s key signed `certificate` and the names agree. Dates are not checked."""
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


class CertificateAuthority:
    """The run's CA, whose key signs the certificates of coordinator and nodes."""

    def __init__(self, run_id: str, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
        self.run_id = run_id
        self.certificate = certificate
        self._key = key

    @classmethod
    def create(cls, run_id: str, now: float) -> "CertificateAuthority":
        """A new authority for one run. `now` is Unix seconds; ValueError for a malformed run id."""
        if not is_run_id(run_id):
            raise ValueError(f"{run_id!r} is not a run id of up to 40 lower-case letters, digits and hyphens")
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, _CA_COMMON_NAME + run_id)])
        certificate = (
            _builder(name, name, key.public_key(), key.public_key(), now, AUTHORITY_LIFETIME)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(certificate_sign=True), critical=True)
            .sign(key, hashes.SHA256())
        )
        return cls(run_id, key, certificate)

    def save(self, directory: Path) -> None:
        """Write `ca.key` and `ca.pem` (mode 0600) into `directory`, created (mode 0700) if missing."""
        make_private_directory(directory)
        write_private(directory / _KEY_FILE, key_to_pem(self._key))
        write_private(directory / _CERTIFICATE_FILE, self.certificate_pem)

    @classmethod
    def load(cls, directory: Path) -> "CertificateAuthority":
        """Read what `save` wrote. Raises UserError if it is missing or damaged."""
        try:
            key_pem = (directory / _KEY_FILE).read_bytes()
            certificate_pem = (directory / _CERTIFICATE_FILE).read_bytes()
        except OSError as error:
            raise UserError(
                f"{directory} holds no certificate authority ({error.strerror}): give a run's directory"
            ) from None
        damaged = UserError(f"the certificate authority in {directory} is damaged: restore ca.key and ca.pem")
        try:
            key = serialization.load_pem_private_key(key_pem, password=None)
            certificate = read_certificate(certificate_pem)
        except (ValueError, TypeError):
            raise damaged from None
        run_id = authority_run_id(certificate)
        if not isinstance(key, ec.EllipticCurvePrivateKey) or run_id is None:
            raise damaged
        if public_key_hash(key.public_key()) != certificate_pin(certificate):
            raise damaged
        return cls(run_id, key, certificate)

    @property
    def pin(self) -> bytes:
        """SHA-256 of the CA's SubjectPublicKeyInfo, as join tokens carry it."""
        return public_key_hash(self._key.public_key())

    @property
    def certificate_pem(self) -> bytes:
        return certificate_to_pem(self.certificate)

    def issue_node(
        self, public_key: ec.EllipticCurvePublicKey, node_id: str, lifetime: timedelta, now: float
    ) -> bytes:
        """A node's PEM certificate for client and server: CN is the node id, SAN
        `<node-id>.nodes.<run-id>`."""
        server_name = node_server_name(node_id, self.run_id)
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
        builder = self._leaf(public_key, node_id, [x509.DNSName(server_name)], usages, lifetime, now)
        return certificate_to_pem(builder.sign(self._key, hashes.SHA256()))

    def issue_coordinator(
        self, public_key: ec.EllipticCurvePublicKey, lifetime: timedelta, now: float
    ) -> bytes:
        """The coordinator's PEM certificate, with the CA's certificate inside. Its SANs are
        `coordinator.<run-id>`, `control.<run-id>`, `session.<run-id>` and the name for first contact."""
        name = coordinator_server_name(self.run_id)
        of_members = control_server_name(self.run_id), session_server_name(self.run_id)
        names = [_general_name(host) for host in (name, *of_members, JOIN_NAME)]
        usages = [ExtendedKeyUsageOID.SERVER_AUTH]
        builder = self._leaf(public_key, name, names, usages, lifetime, now)
        issuer = self.certificate.public_bytes(serialization.Encoding.DER)
        builder = builder.add_extension(
            x509.UnrecognizedExtension(ISSUER_CERTIFICATE_OID, issuer), critical=False
        )
        return certificate_to_pem(builder.sign(self._key, hashes.SHA256()))

    def page_credentials(self, hosts: Sequence[str], lifetime: timedelta, now: float) -> tuple[bytes, bytes]:
        """(key PEM, certificate PEM) for browsers of the run's page at `hosts`, names or IP addresses.

        The certificate names neither the coordinator nor a node, so nodes do not accept it.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        subject = f"page.{self.run_id}"
        names = [_general_name(host) for host in (subject, *hosts)]
        usages = [ExtendedKeyUsageOID.SERVER_AUTH]
        builder = self._leaf(key.public_key(), subject, names, usages, lifetime, now)
        return key_to_pem(key), certificate_to_pem(builder.sign(self._key, hashes.SHA256()))

    def coordinator_credentials(self, lifetime: timedelta, now: float) -> tuple[bytes, bytes]:
        """(key PEM, certificate PEM) for a coordinator that starts. The key is new and never stored.

        The process also holds the CA's key, so a short lifetime would protect nothing.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        return key_to_pem(key), self.issue_coordinator(key.public_key(), lifetime, now)

    def _leaf(
        self,
        public_key: ec.EllipticCurvePublicKey,
        common_name: str,
        names: list[x509.GeneralName],
        usages: list[x509.ObjectIdentifier],
        lifetime: timedelta,
        now: float,
    ) -> x509.CertificateBuilder:
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
        issuer_key = self._key.public_key()
        return (
            _builder(subject, self.certificate.subject, public_key, issuer_key, now, lifetime)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(digital_signature=True), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
        )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    issuer_key: ec.EllipticCurvePublicKey,
    now: float,
    lifetime: timedelta,
) -> x509.CertificateBuilder:
    issued = datetime.fromtimestamp(now, UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(issued - BACKDATE)
        .not_valid_after(issued + lifetime)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), critical=False)
    )


def _key_usage(*, digital_signature: bool = False, certificate_sign: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=certificate_sign,
        crl_sign=certificate_sign,
        encipher_only=False,
        decipher_only=False,
    )
