"""Sizes of page-locked host memory, and of the pieces in which state is processed. This module imports no
torch.

torch rounds a page-locked tensor up to a power of two, which may nearly double its size. So large tensors are
split into pieces.
"""

LARGEST_PIECE = 1 << 25
"""The largest piece in bytes. Copies of this size reach the copy engine's full speed."""
SMALLEST_PIECE = 1 << 20
"""The smallest piece in bytes, except for the last one."""
GRADIENT_PIECE = 1 << 22
"""The number of gradient elements that are processed at a time, for the norm, packing or unpacking."""
STATE_PIECE = 1 << 24
"""The number of a matrix's state elements that an optimizer holds at a time if it streams state from host
memory."""


def page_locked(size: int) -> int:
    """The page-locked memory in bytes that torch allocates for a tensor of `size` bytes."""
    return 1 << max(0, size - 1).bit_length() if size else 0


def pieces_of(size: int) -> list[int]:
    """The sizes of pieces that together hold `size` bytes, in order: powers of two, then a last piece below
    `SMALLEST_PIECE`."""
    sizes = [LARGEST_PIECE] * (size // LARGEST_PIECE)
    left, piece = size % LARGEST_PIECE, LARGEST_PIECE // 2
    while piece >= SMALLEST_PIECE:
        if left >= piece:
            sizes.append(piece)
            left -= piece
        piece //= 2
    return sizes + [left] * (left > 0)


def in_pieces(size: int) -> int:
    """The most page-locked memory that `size` bytes take in such pieces."""
    return size + SMALLEST_PIECE
