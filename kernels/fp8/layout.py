"""How many blocks e4m3 numbers take. Imports no torch; `kernels.fp8.reference` has the arithmetic."""

BLOCK = 128


def blocks(elements: int) -> int:
    """Blocks that hold this many elements."""
    return -(-elements // BLOCK)
