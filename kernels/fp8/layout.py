"""How many blocks e4m3 numbers take, and what products of them need. Imports no torch; the arithmetic is in
`kernels.fp8.reference` and `kernels.fp8.rows`."""

BLOCK = 128
POWER_UNIT = 16
"""A moment's power is in parts of one in so many."""
MULTIPLE = 16
"""What cuBLAS needs the inputs and outputs of a product in e4m3 to be a multiple of."""


def blocks(elements: int) -> int:
    """Blocks that hold this many elements."""
    return -(-elements // BLOCK)
