"""The definition and constants of the `trellis` codec's path and code, for CPU and GPU alike.

**The path** is trellis-coded quantization with four states. Values are multiples n of a step. Even n belong
to quantizer 0, with index n / 2, and odd n to quantizer 1, with index (n - 1) / 2. Each quantizer is as
coarse as two steps, but the indices before an element decide which of them it uses:
`s(t+1) = parity(t) xor s(t-1)`, with both 0 at a lane's start. So an encoder that looks ahead comes about as
near to the values as with one finer quantizer, at the price of the coarse one: it has 1.0 dB less noise than
rounding at the same bits. No quantizer can gain more than 1.53 dB. (Ungerboeck's code with parity checks 5
and 2; Marcellin and Fischer, 1990; as in JPEG 2000, part 2, and VVC's dependent quantization.) The Viterbi
search is in 64ths of a step: squared distances are at most 2**14 each, and a lane's sum of 2**12 of them fits
32 bits.

**The code** is rANS. The lanes of a group share one stream of 16-bit words. Each lane has a state in [2**15,
2**31). In a decoder's step every lane takes its symbol, then each lane whose state fell below 2**15 takes one
word, in the order of the lanes. The shift of an element's class cuts its index in two. The upper part is the
symbol. The lower part follows as it is, in up to two pieces, the first of at most 10 bits. An escape symbol
is followed only by n's 26 bits in two pieces of 13. Pieces are taken like symbols: first the first pieces of
all lanes, then the second ones. The encoder goes backwards and starts every lane at 2**15, which is where the
decoder must end. That check, and that the stream is used up, show that the code is valid.
"""

from dataclasses import dataclass

import torch

from kernels.trellis.tables import CLASSES

LOW = 1 << 15
STATE_BITS = 31
# Bits of a fraction of a step.
FRACTION_BITS = 6
# An escaped element's n is counted from -2**25.
ESCAPE_PIECE = 13
ESCAPE_BIAS = 1 << (2 * ESCAPE_PIECE - 1)
# The widest first piece of an index's lower part, in bits.
PIECE = 10
# Higher classes use the tables of the last octave, with one more bit below the symbol for every four classes.
UNSHIFTED = CLASSES - 4


@dataclass(frozen=True, slots=True)
class Coded:
    """A tensor's coded lanes."""

    states: torch.Tensor  # int32 [groups, lanes]
    counts: torch.Tensor  # int32 [groups], of words
    words: torch.Tensor  # int16 [groups, capacity]: every group's lie at the end
