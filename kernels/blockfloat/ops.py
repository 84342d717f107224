"""Stored tensors by device: the reference on a CPU, Triton's kernels on a GPU, with the same stored bits.

These functions never wait for the device. A GPU without Triton runs the reference.
"""

from kernels.blockfloat import layers
from kernels.blockfloat import reference as blockfloat
from kernels.common.dispatch import by_device

_STORE, _NORM, _FFN = (f"{__package__}.triton.{name}" for name in ("store", "norm", "ffn"))

store = by_device("storage", _STORE, blockfloat.pack)
restore = by_device("storage", _STORE, blockfloat.unpack)
norm_store = by_device("storage", _NORM, layers.norm_store)
norm_from_stored = by_device("storage", _NORM, layers.norm_from_stored)
norm_backward = by_device("storage", _NORM, layers.norm_backward)
ffn_store = by_device("storage", _FFN, layers.ffn_store)
ffn_backward = by_device("storage", _FFN, layers.ffn_backward)
