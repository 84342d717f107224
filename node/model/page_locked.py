"""Sizes of page-locked host memory, and of the pieces in which state is processed. Torch-free.

torch rounds a page-locked tensor up to a power of two, which may nearly double it. What is large is laid in
pieces.
"""

LARGEST_PIECE = 1 << 25
"""Bytes: as large as copies take to reach the engine's speed."""
SMALLEST_PIECE = 1 << 20
GRADIENT_PIECE = 1 << 22
"""Elements of a gradient that are processed at a time: for its norm, packing or unpacking."""
STATE_PIECE = 1 << 24
"""Elements of a matrix's state that an optimizer which streams it from host memory has at a time."""


def page_locked(size: int) -> int:
    """What page-locked memory for one tensor of this size takes."""
    return 1 << max(0, size - 1).bit_length() if size else 0


def pieces_of(size: int) -> list[int]:
    """Sizes of pieces that together hold `size` bytes, in order: powers of two, and a last one below
    `SMALLEST_PIECE`."""
    found = [LARGEST_PIECE] * (size // LARGEST_PIECE)
    left, piece = size % LARGEST_PIECE, LARGEST_PIECE // 2
    while piece >= SMALLEST_PIECE:
        if left >= piece:
            found.append(piece)
            left -= piece
        piece //= 2
    return found + [left] * (left > 0)


def in_pieces(size: int) -> int:
    """The most that page-locked memory for `size` bytes takes in such pieces."""
    return size + SMALLEST_PIECE
