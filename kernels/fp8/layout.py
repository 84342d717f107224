"""The blocks of numbers in e4m3 (`kernels.fp8.reference` has the arithmetic). Torch-free."""

BLOCK = 128


def blocks(elements: int) -> int:
    """How many blocks hold so many elements."""
    return -(-elements // BLOCK)
