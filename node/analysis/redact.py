"""Lines about nodes, without where those nodes can be reached."""

import re

_ADDRESS = re.compile(
    # [2001:db8::1]:7700, its brackets perhaps as gRPC writes them, %5B and %5D
    r"(?:\[|%5B)(?=[^\s\]:]*:[^\s\]:]*:)[0-9A-F:.]+(?:%[\w.-]+?)?(?:\]|%5D)(?::\d+)?"
    # fe80::1%eth0, and one that has all its eight groups
    r"|(?<![\w:])(?=[0-9A-F:]*::)(?=:*[0-9A-F])[0-9A-F:]{3,}(?:(?:\.\d+){3})?(?:%\w+)?(?![\w:])"
    r"|\b(?:[0-9A-F]{1,4}:){7}[0-9A-F]{1,4}\b"
    r"|\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b"  # 192.0.2.1:7700
    r"|\b\w(?:[\w-]*\.)+[^\W\d_][\w-]*\.?:\d+\b"  # node.example.org:7700
    # alices-pc:7710, but not cuda:0 or the hours of a date; what has no letter is a time or a pair of steps
    r"|\b(?!(?:cuda|cpu):\d\d?\b)(?!(?:[\d-]*-)?\d\dT\d\d:)(?=[\w-]*[^\W\d_])\w[\w-]*:\d{1,5}(?!\w|[.:]\d)",
    re.IGNORECASE,
)


def without_addresses(text: str) -> str:
    """`text` with every IP address and every host:port in it replaced by three dots."""
    return _ADDRESS.sub("...", text)
