"""How many blocks e4m3 numbers take, and which sizes their products need. Does not import torch.

The arithmetic is in `kernels.fp8.reference` and `kernels.fp8.rows`.
"""

BLOCK = 128
POWER_UNIT = 16
"""A moment's power is stored in units of 1 over this."""
MULTIPLE = 16
"""cuBLAS needs the inputs and the outputs of a product in e4m3 to be a multiple of this."""


def blocks(elements: int) -> int:
    return -(-elements // BLOCK)
