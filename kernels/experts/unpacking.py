"""When packed weights of experts are unpacked before their products. This module imports no torch."""

UNPACKED_ROWS = 64
"""From this many rows an expert on, on average, packed weights are unpacked before the product."""
UNPACKED_BYTES = 128 << 20
"""The unpacked matrices that exist at a time; at least one expert's."""


def unpacked_at_once(experts: int, matrix: int, rows: int) -> int:
    """How many experts' matrices are unpacked at a time before their products; 0 if the product unpacks them.

    Args:
        matrix: bytes of an expert's unpacked matrix.
        rows: rows of all experts, T k.
    """
    if rows < UNPACKED_ROWS * experts:
        return 0
    pieces = min(experts, -(-experts * matrix // UNPACKED_BYTES))
    at_once = -(-experts // pieces)
    # Offsets from a multiple of four on have one alignment, which a kernel is compiled for.
    return min(experts, -(-at_once // 4) * 4)
