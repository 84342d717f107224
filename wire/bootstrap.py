"""First contact: fetch the run's CA from a coordinator, and trust it only if it matches the join token's pin.

This connection needs no verification: nothing is sent over it, and the answer is compared with the pin. The
CA is then the root of the verified connection that carries the secret.
"""

import asyncio
import ssl
import time

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm

from wire.dialing import ProxyError, connect
from wire.errors import LinkError, TokenError
from wire.identity.authority import (
    ISSUER_CERTIFICATE_OID,
    authority_run_id,
    certificate_pin,
    is_issued_by,
    read_certificate,
)
from wire.identity.names import JOIN_NAME, split_address


async def fetch_authority(address: str, pin: bytes, seconds: float = 10.0) -> x509.Certificate:
    """The certificate of the CA that certified the coordinator at `address` (host:port).

    Args:
        pin: SHA-256 of the SubjectPublicKeyInfo that the CA must have, 32 bytes.
        seconds: limit for the connection and the TLS handshake together.

    Raises TokenError if another run or another service answers, and LinkError if nothing answers.
    """
    leaf = await _fetch_leaf(address, seconds)
    try:
        extension = leaf.extensions.get_extension_for_oid(ISSUER_CERTIFICATE_OID).value
        if not isinstance(extension, x509.UnrecognizedExtension):
            raise ValueError("not the extension's own bytes")
        authority = read_certificate(extension.value)
        actual = certificate_pin(authority)
    except (ValueError, x509.ExtensionNotFound, x509.DuplicateExtension, UnsupportedAlgorithm):
        raise TokenError(
            f"{address} is not a coordinator's join port: check the address, or ask for a new join token"
        ) from None
    if actual != pin:
        run_id = authority_run_id(authority) or "(unnamed)"
        raise TokenError(
            f"{address} belongs to run {run_id} with key {actual.hex()[:12]}, but the "
            f"join token is for a run with key {pin.hex()[:12]}: ask for a new join token; if that one "
            "fails too, do not trust this network"
        )
    if not (is_issued_by(authority, authority) and is_issued_by(leaf, authority)):
        raise TokenError(f"{address} presents a forged certificate: do not join over this network")
    _check_clock(leaf, address)
    return authority


async def _fetch_leaf(address: str, seconds: float) -> x509.Certificate:
    try:
        split_address(address)
    except ValueError as error:
        raise TokenError(str(error)) from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        async with asyncio.timeout(seconds):
            raw = await connect(address)
            try:
                _, writer = await asyncio.open_connection(sock=raw, ssl=context, server_hostname=JOIN_NAME)
            except BaseException:
                raw.close()
                raise
    except ProxyError as error:
        raise LinkError(str(error)) from None
    except TimeoutError:
        raise LinkError(f"nothing answered at {address} within {seconds:g} s: is it reachable?") from None
    except ssl.SSLError as error:
        reason = error.reason or "handshake failed"
        raise LinkError(f"{address} does not speak TLS as a coordinator does ({reason}): check it") from None
    except (OSError, UnicodeError) as error:
        # asyncio joins the failures of several resolved addresses into one error without a strerror.
        reason = getattr(error, "strerror", None) or str(error)
        raise LinkError(f"nothing answers at {address} ({reason}): is the coordinator running?") from None
    try:
        connection: ssl.SSLObject = writer.get_extra_info("ssl_object")
        leaf = connection.getpeercert(binary_form=True)
    finally:
        # Nothing was sent, so there is nothing to flush or wait for.
        writer.transport.abort()
    if leaf is None:
        raise LinkError(f"{address} presents no certificate: it is not a coordinator's join port")
    try:
        return read_certificate(leaf)
    except ValueError:
        raise LinkError(f"{address} presents an unreadable certificate: it is not a join port") from None


def _check_clock(leaf: x509.Certificate, address: str) -> None:
    """Raise LinkError if this machine's clock is wrong; verification would fail without a reason."""
    now = time.time()
    first, last = leaf.not_valid_before_utc.timestamp(), leaf.not_valid_after_utc.timestamp()
    if not first <= now <= last:
        when = "not valid yet" if now < first else "no longer valid"
        raise LinkError(
            f"by this machine's clock the certificate of {address} is {when}: it is valid from "
            f"{leaf.not_valid_before_utc:%Y-%m-%d %H:%M} to {leaf.not_valid_after_utc:%Y-%m-%d %H:%M} UTC; "
            "set the clock"
        )
