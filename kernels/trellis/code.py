"""The `trellis` codec's path and code: their definition and constants, for CPU and GPU alike.

**The path** (trellis-coded quantization with four states). Values are multiples n of a step. Even n belong
to quantizer 0, with index n / 2, odd ones to quantizer 1, with index (n - 1) / 2. Each quantizer is as
coarse as two steps, but which of them an element uses follows from the indices before it: with both 0 at a
lane's start, `s(t+1) = parity(t) xor s(t-1)`. So an encoder that looks ahead finds values about as near as
with one finer quantizer, at the coarse one's price: 1.0 dB less noise than rounding at the same bits. No
quantizer can gain more than 1.53 dB. (Ungerboeck's code with parity checks 5 and 2; Marcellin and Fischer,
1990; as in JPEG 2000, part 2, and VVC's dependent quantization.) The search (Viterbi's) is in 64ths of a
step: squared distances are at most 2**14 each, and a lane's sum of 2**12 of them fits 32 bits.

**The code** (rANS). A group's lanes share one stream of 16-bit words; each has a state of its own in
[2**15, 2**31). A decoder's step: every lane takes its symbol, then the lanes whose state fell below 2**15
take one word each, in the order of the lanes. An index is cut in two by its class's shift: what is above is
the symbol, what is below follows as it is, in up to two pieces, the first of at most 10 bits; behind an
escape follow n's 26 bits in two pieces of 13, and nothing else. Pieces are taken as symbols are, first all
lanes' first ones, then the second ones. The encoder goes backwards and starts every lane at 2**15, which is
where the decoder must end. That, and a stream that is used up, show that the code is sound.
"""

from dataclasses import dataclass

import torch

from kernels.trellis.tables import CLASSES

LOW = 1 << 15
STATE_BITS = 31
# Fractions of a step, in bits.
FRACTION_BITS = 6
# n of an escaped element, counted from -2**25.
ESCAPE_PIECE = 13
ESCAPE_BIAS = 1 << (2 * ESCAPE_PIECE - 1)
# The widest first piece of what is below a symbol.
PIECE = 10
# Classes above have the last octave's tables: a bit more below the symbol with every four of them.
UNSHIFTED = CLASSES - 4


@dataclass(frozen=True, slots=True)
class Coded:
    """A tensor's coded lanes."""

    states: torch.Tensor  # int32 [groups, lanes]
    counts: torch.Tensor  # int32 [groups], of words
    words: torch.Tensor  # int16 [groups, capacity]: every group's lie at the end
