"""The page over TLS, by a certificate of the run's own CA."""

import socket
import ssl
import time
from datetime import timedelta
from pathlib import Path

from node.config.schema import RunConfig
from node.coordinator.ports import own_hosts
from node.run_file.validate import parse_listen
from wire.identity.authority import CertificateAuthority
from wire.identity.files import write_private

CERTIFICATE_LIFETIME = timedelta(days=365)
"""Browsers refuse certificates that last much longer; each start of a coordinator makes another."""


def page_tls(
    config: RunConfig, host: str, authority: CertificateAuthority, directory: Path
) -> ssl.SSLContext:
    """With a certificate for every name that the page at `host` may be asked under.

    A browser trusts it once it was given the CA's certificate, `directory`/authority/ca.pem.
    """
    advertised = (parse_listen(address)[0] for address in config.coordinator.advertise)
    names = dict.fromkeys((*own_hosts(host), *advertised, socket.gethostname(), "localhost"))
    key, certificate = authority.page_credentials(tuple(names), CERTIFICATE_LIFETIME, time.time())
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    # The standard library reads keys from files alone.
    path = directory / "page.pem"
    write_private(path, key + certificate + authority.certificate_pem)
    try:
        context.load_cert_chain(path)
    finally:
        path.unlink()
    return context
