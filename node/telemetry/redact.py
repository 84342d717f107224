"""Lines about nodes, without where those nodes can be reached."""

import re

_ADDRESS = re.compile(
    r"\[[0-9A-Fa-f:.%]+\](?::\d+)?"  # [2001:db8::1]:7700
    r"|\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b"  # 192.0.2.1:7700
    r"|\b[0-9A-Za-z](?:[0-9A-Za-z-]*\.)+[A-Za-z][0-9A-Za-z-]*:\d+\b"  # node.example.org:7700
    r"|\blocalhost:\d+\b"
)


def without_addresses(text: str) -> str:
    """`text` with every IP address and every host:port in it replaced by three dots."""
    return _ADDRESS.sub("...", text)
