"""Identities for tests: a run's certificate authority, its nodes, and a node's first message."""

import time
from datetime import timedelta

from cryptography.hazmat.primitives.asymmetric import ec

from wire.identity.authority import CertificateAuthority, key_to_pem, public_key_hash
from wire.identity.credentials import NodeIdentity
from wire.identity.enrolment import Hardware
from wire.identity.names import node_id_of
from wire.messages import Hello
from wire.version import PROTOCOL, VERSION

RUN_ID = "test-run"


def new_authority(run_id: str = RUN_ID) -> CertificateAuthority:
    return CertificateAuthority.create(run_id, time.time())


def new_node(authority: CertificateAuthority, lifetime: timedelta = timedelta(hours=1)) -> NodeIdentity:
    """A node of the authority's run, with a key of its own."""
    key = ec.generate_private_key(ec.SECP256R1())
    node_id = node_id_of(public_key_hash(key.public_key()))
    return NodeIdentity(
        node_id=node_id,
        run_id=authority.run_id,
        key_pem=key_to_pem(key),
        certificate_pem=authority.issue_node(key.public_key(), node_id, lifetime, time.time()),
        ca_pem=authority.certificate_pem,
    )


def hello(address: str) -> Hello:
    """The hello of a small node that neighbours dial at `address`."""
    return Hello(
        version=VERSION,
        protocol=PROTOCOL,
        peer_address=address,
        hardware=Hardware("cpu", 2, 0),
        flops=1.0,
        download_rate=1.0,
        epoch=0,
        process_nonce=7,
    )
