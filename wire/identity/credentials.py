"""A node's identity: its key, its certificate and its run's CA, on disk and as gRPC credentials.

Each identity has its own directory (mode 0700), so one machine can host several nodes. `node.key` is created
first and never sent. `identity.json` holds the certificates and is replaced as a whole at each renewal.
"""

import codecs
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from wire.errors import LinkError, RefusalCode, Refused, UserError
from wire.identity.authority import (
    BACKDATE,
    certificate_pin,
    is_issued_by,
    key_to_pem,
    public_key_hash,
    read_certificate,
)
from wire.identity.files import create_private, make_private_directory, state_folder, write_private
from wire.identity.names import (
    control_server_name,
    is_node_id,
    is_run_id,
    node_server_name,
    session_server_name,
)

_KEY_FILE, _IDENTITY_FILE = "node.key", "identity.json"

WAY_SECONDS = 60.0
"""How long a new certificate may take to reach its node."""

ChannelOption = tuple[str, int | str]


def default_directory(run_id: str, name: str = "node") -> Path:
    """`$XDG_STATE_HOME/thinwire/<run-id>/<name>`, with `~/.local/state` if the variable is not set. Raises
    UserError if there is no home directory either."""
    return state_folder() / run_id / name


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """A node's identity in one run. It is immutable; a renewal creates a new one."""

    node_id: str
    run_id: str
    key_pem: bytes = field(repr=False)
    certificate_pem: bytes = field(repr=False)
    ca_pem: bytes = field(repr=False)

    def __post_init__(self) -> None:
        """Raise ValueError unless key, certificate and CA match each other, this node and this run."""
        certificate, key = self._certificate, load_key(self.key_pem)
        authority = read_certificate(self.ca_pem)
        names = [name.value for name in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
        try:
            alternatives = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            hosts = alternatives.get_values_for_type(x509.DNSName)
        except x509.ExtensionNotFound:
            hosts = []
        if not (is_run_id(self.run_id) and is_node_id(self.node_id)):
            raise ValueError("the node id or run id is malformed")
        if names != [self.node_id] or hosts != [node_server_name(self.node_id, self.run_id)]:
            raise ValueError("the certificate names another node")
        if certificate_pin(certificate) != public_key_hash(key.public_key()):
            raise ValueError("the certificate is for another key")
        if not is_issued_by(certificate, authority):
            raise ValueError("the certificate was issued by another authority")

    @property
    def _certificate(self) -> x509.Certificate:
        return read_certificate(self.certificate_pem)

    @property
    def coordinator_name(self) -> str:
        """The name to expect in the coordinator's certificate."""
        return control_server_name(self.run_id)

    @property
    def session_name(self) -> str:
        """The name to expect in the coordinator's certificate on a control session."""
        return session_server_name(self.run_id)

    def server_name(self, node_id: str) -> str:
        """The name to expect in the certificate of a node of this run."""
        return node_server_name(node_id, self.run_id)

    @property
    def pin(self) -> bytes:
        """SHA-256 of the CA's SubjectPublicKeyInfo, as in the join token."""
        return certificate_pin(read_certificate(self.ca_pem))

    @property
    def expires_at(self) -> float:
        """When the certificate expires, in Unix seconds."""
        return self._certificate.not_valid_after_utc.timestamp()

    def ended(self) -> str:
        """The message about an expired certificate, which stops this node."""
        when = datetime.fromtimestamp(self.expires_at, UTC)
        return (
            f"this node's certificate expired at {when:%Y-%m-%d %H:%M} UTC, while the machine was suspended "
            "or the coordinator unreachable"
        )

    @property
    def renewal_time(self) -> float:
        """When to renew, in Unix seconds: 50 to 80 % into the lifetime, at a point derived from the node id.

        So nodes that joined together do not renew together, and each node's point stays the same.
        """
        issued = self._issued_at
        spread = int.from_bytes(hashlib.sha256(self.node_id.encode()).digest()[:4]) / 2**32
        return issued + (0.5 + 0.3 * spread) * (self.expires_at - issued)

    @property
    def _issued_at(self) -> float:
        return (self._certificate.not_valid_before_utc + BACKDATE).timestamp()

    def check_clock(self, now: float) -> None:
        """Compare this machine's clock with the coordinator's, using a certificate issued just now.

        Raises LinkError if a neighbour's certificate could seem expired or not yet valid here, which makes
        handshakes fail without a reason. It may be as new as this one, or have a fifth of its life left.
        """
        ahead = now - self._issued_at
        most = max(WAY_SECONDS, 0.2 * (self.expires_at - self._issued_at))
        if not -BACKDATE.total_seconds() <= ahead <= most:
            which = "ahead of" if ahead > 0 else "behind"
            raise LinkError(
                f"this machine's clock is {abs(ahead) / 3600:.1f} hours {which} the coordinator's, and its "
                "neighbours' certificates would not seem valid: set the clock"
            )

    def is_valid(self, now: float, margin: timedelta = timedelta(0)) -> bool:
        """Whether the certificate is valid at Unix time `now` and for `margin` longer."""
        starts = self._certificate.not_valid_before_utc.timestamp()
        return starts <= now and now + margin.total_seconds() < self.expires_at

    def csr_der(self) -> bytes:
        """A certificate request signed by this node's key, for `Renew`."""
        return make_csr(self.key_pem)

    def renewed(self, certificate_pem: bytes) -> "NodeIdentity":
        """This identity with a new certificate. Raises Refused if the certificate is not for this node."""
        try:
            return replace(self, certificate_pem=certificate_pem)
        except ValueError as error:
            raise Refused(
                RefusalCode.BAD_REQUEST,
                f"the coordinator's new certificate for {self.node_id} cannot be used ({error}): join again",
            ) from None

    def save(self, directory: Path) -> None:
        """Write the identity atomically into `directory` (mode 0700), but keep an existing key."""
        make_private_directory(directory)
        if _without_mark(create_private(directory / _KEY_FILE, self.key_pem)) != self.key_pem:
            raise UserError(f"{directory} holds another node's key: give each node a directory of its own")
        content = {
            "node_id": self.node_id,
            "run_id": self.run_id,
            "certificate_pem": self.certificate_pem.decode(),
            "ca_pem": self.ca_pem.decode(),
        }
        write_private(directory / _IDENTITY_FILE, json.dumps(content, indent=1).encode())

    @classmethod
    def load(cls, directory: Path) -> "NodeIdentity | None":
        """The identity in `directory`, or None if none was saved. Raises UserError if it is damaged."""
        try:
            content = json.loads((directory / _IDENTITY_FILE).read_bytes())
            key_pem = _without_mark((directory / _KEY_FILE).read_bytes())
            return cls(
                node_id=content["node_id"],
                run_id=content["run_id"],
                key_pem=key_pem,
                certificate_pem=content["certificate_pem"].encode(),
                ca_pem=content["ca_pem"].encode(),
            )
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UserError(f"the node identity in {directory} cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise UserError(
                f"the node identity in {directory} is damaged: delete the directory and join with a new token"
            ) from None


def load_or_create_key(directory: Path) -> bytes:
    """The PEM of the P-256 key in `directory`, which is created (mode 0600) if there is none.

    It is on disk before its first use, so a node that dies while joining retries with the same key.
    """
    make_private_directory(directory)
    path = directory / _KEY_FILE
    try:
        pem = _without_mark(path.read_bytes())
    except FileNotFoundError:
        pem = create_private(path, key_to_pem(ec.generate_private_key(ec.SECP256R1())))
    try:
        load_key(pem)
    except ValueError:
        raise UserError(f"{path} is damaged: delete {directory} and join with a new token") from None
    return pem


def _without_mark(pem: bytes) -> bytes:
    """The key without the byte order mark of an editor, behind which gRPC reads none."""
    return pem.removeprefix(codecs.BOM_UTF8)


def load_key(pem: bytes) -> ec.EllipticCurvePrivateKey:
    """Load a PEM private key. Raises ValueError unless it is an unencrypted P-256 key."""
    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except TypeError:
        raise ValueError("the key is encrypted") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ValueError("the key is not on P-256")
    return key


def make_csr(key_pem: bytes) -> bytes:
    """A certificate request (DER) that holds and proves only a key. The CA decides the rest."""
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return request.sign(load_key(key_pem), hashes.SHA256()).public_bytes(serialization.Encoding.DER)


def server_name_options(server_name: str) -> list[ChannelOption]:
    """Channel options that expect `server_name` in the certificate, whatever address is dialled."""
    return [("grpc.ssl_target_name_override", server_name)]


def mutual_tls(current: Callable[[], tuple[bytes, bytes]], ca_pem: bytes) -> grpc.ServerCredentials:
    """Server credentials that require a certificate of the run's CA.

    `current` returns (key PEM, certificate PEM) without blocking. gRPC's threads call it at each handshake,
    so a renewal needs no restart. Established connections are not affected.
    """
    in_use = current()

    def configuration() -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([in_use], root_certificates=ca_pem)

    # Return a certificate only if it changed: gRPC frees the old state while other handshakes use it, and
    # crashes (grpc/grpc#36693).
    def configuration_if_changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal in_use
        if (newest := current()) == in_use:
            return None
        in_use = newest
        return configuration()

    return grpc.dynamic_ssl_server_credentials(
        configuration(),
        configuration_if_changed,  # type: ignore[arg-type]  # the stubs omit None, which means no change
        require_client_authentication=True,
    )


def peer_node_id(context: grpc.aio.ServicerContext[Any, Any] | grpc.ServicerContext) -> str | None:
    """The node id in the certificate of an RPC's peer; None if it has none."""
    # The stubs of the two stacks disagree on the values.
    names: list[bytes] = list(context.auth_context().get("x509_common_name", ()))  # type: ignore[arg-type]
    node_id = names[0].decode(errors="replace") if len(names) == 1 else ""
    return node_id if is_node_id(node_id) else None
