"""Run ids, node ids, server names in certificates, and network addresses."""

import hashlib
import re
import secrets
from base64 import b32encode

_RUN_ID = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,38}[a-z0-9])?")
_NODE_ID = re.compile(r"node-[a-z2-7]{10}")
MOST_NAME = 40
"""The most characters of a node's name, which its owner chooses."""
MOST_HOST = 255
"""The most characters of a host. A member's addresses are passed on to its neighbours."""
_LETTERS = "abcdefghjkmnpqrstuvwxyz23456789"


def new_run_id(name: str) -> str:
    """A new run id: `name` in lower-case letters, digits and hyphens (at most 32), and five random
    characters.

    The random part distinguishes runs with the same name, so a certificate of one is not valid in another.
    """
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:32].rstrip("-")
    suffix = "".join(secrets.choice(_LETTERS) for _ in range(5))
    return f"{label}-{suffix}" if label else suffix


def is_run_id(text: str) -> bool:
    """Whether `text` is a run id: 1 to 40 lower-case letters, digits and inner hyphens (one DNS label)."""
    return _RUN_ID.fullmatch(text) is not None


def is_node_id(text: str) -> bool:
    """Whether `text` is a node id as `node_id_of` returns it."""
    return _NODE_ID.fullmatch(text) is not None


def clean_name(text: str) -> str:
    """An owner's name for a node, as one line of at most `MOST_NAME` printable characters.

    Double quotes become single ones, because names are shown between double quotes.
    """
    shown = "".join(char if char.isprintable() else " " for char in text[: 4 * MOST_NAME])
    return " ".join(shown.replace('"', "'").split())[:MOST_NAME].rstrip()


def node_id_of(public_key_hash: bytes) -> str:
    """The id of the node with this key (SHA-256 of the public key's SPKI). It stays when the node rejoins.

    50 bits of the hash suffice, because the coordinator refuses a second key with the same id.
    """
    digest = hashlib.sha256(b"thinwire node id" + public_key_hash).digest()
    return "node-" + b32encode(digest[:10]).decode().lower()[:10]


def node_server_name(node_id: str, run_id: str) -> str:
    """The name that neighbours expect in a node's certificate."""
    return f"{node_id}.nodes.{run_id}"


JOIN_NAME = "join.thinwire"
"""The server name for first contact, when the run's CA is not known yet."""


def coordinator_server_name(run_id: str) -> str:
    """The name that nodes expect in the coordinator's certificate when they enrol."""
    return f"coordinator.{run_id}"


def control_server_name(run_id: str) -> str:
    """The name that nodes with a certificate ask for. At a shared port it selects mutual TLS."""
    return f"control.{run_id}"


def session_server_name(run_id: str) -> str:
    """The name that nodes with a certificate ask for to open a control session, which gateways may serve."""
    return f"session.{run_id}"


def split_address(address: str) -> tuple[str, int]:
    """`host:port` or `[ipv6]:port` as (host without brackets, port). Raises ValueError for anything else."""
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
        host = host[1:-1]
    # It must be printable, because a NUL would end the name in the system's resolver.
    fits = colon and 0 < len(host) <= MOST_HOST and (bracketed or ":" not in host)
    fits = fits and host.isprintable() and " " not in host
    if not fits or not (port.isascii() and port.isdigit()) or not 1 <= int(port) <= 65535:
        raise ValueError(f"{address!r} is not an address: expected host:port, with a port from 1 to 65535")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """The inverse of `split_address`: brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
