"""What passes allocate on a CPU beside what blocks keep, where they allocate the most. Torch-free.

On a CPU blocks run torch's operators and the kernels' references (`kernels.common.layers`,
`kernels.blockfloat.reference`), one after another, so the peak is at one of a few places, and at each it
follows from the shapes of what is there. Coefficients are those of the operators' results and intermediate
tensors; `scripts/checks/memory_settings.py` compares them with what torch counts.
"""

from collections.abc import Sequence

from kernels.blockfloat.layout import BLOCK
from node.config.schema import RunConfig
from node.model.families.known import family_of
from node.model.storage import RECOMPUTE, Storage, head_piece, stored_bytes
from node.model.units import EMBED, HEAD
from node.tuning.device_memory import Devices

AT_ONCE = 2048 * BLOCK
"""Elements that references pack at a time, in rows filled up to blocks."""
SMALL = 1 << 14
_ENCODING, _DECODING = 17, 14
"""Bytes an element that packing and unpacking takes meanwhile."""


class CpuWork:
    """Of a stage that one CPU computes."""

    def __init__(self, config: RunConfig, storage: Storage) -> None:
        model, training = config.model, config.training
        self._model, self._training, self._storage = model, training, storage
        self._family = family_of(model)
        self._inputs = len(self._family.ffn_inputs)
        self._gated = self._inputs == 2
        self._half = training.precision != "float32"
        self._casts = self._half and training.weights != "bfloat16"
        """Weights' gradients are made in half precision and cast."""
        self._element = 2 if self._half else 4
        self._weight = 2 if training.weights == "bfloat16" else 4
        self._tokens = training.microbatch * model.sequence
        packed = training.gradients == "fp8"
        # Unpacked, added to and packed again; one in bfloat16 as it is added.
        self._adding = 9.5 if packed else 4.0 * (training.weights == "bfloat16")
        self._small = SMALL + 16 * self._tokens
        """Vectors and numbers of rows, such as norms' and losses'."""

    @staticmethod
    def covers(config: RunConfig, storage: Storage) -> bool:
        """Whether blocks are those that were measured: without adapters, more norms, or products in FP8."""
        fp8 = config.training.compute == "fp8"
        return config.model.is_plain and config.lora.rank == 0 and not fp8 and not config.sums_tied_gradients

    # ---- blocks

    def block(self) -> int:
        """A block at work, with its weights' fresh gradients."""
        return self._plain_block() if self._storage.is_off else self._packed_block()

    def _sizes(self) -> tuple[int, int, int]:
        """Elements of a microbatch's hidden states, keys, and feed-forward."""
        model = self._model
        return (
            self._tokens * model.hidden,
            self._tokens * self._family.kv_width(model),
            self._tokens * model.ffn,
        )

    def _matrices(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Of attention's half and the feed-forward's: elements of the matrices into it, together, and of the
        one out of it."""
        sizes = [product.elements for product in self._family.products(self._model)]
        return (sizes[0], sizes[1]), (sizes[2], sizes[3])

    def _largest(self, into: int, out: int) -> int:
        """Elements of the largest matrix of a half."""
        # A gate and what it gates are two; joined queries, keys and values are one.
        parts = 2 if self._gated and into == 2 * out else 1
        return max(into // parts, out)

    def _plain_block(self) -> int:
        hidden, _, wide = self._sizes()
        element = self._element
        made = []
        for into, out in self._matrices():
            one = self._largest(into, out)
            # A matrix's gradient as it is made, cast and added.
            made.append(int((self._weight + max(2.0 * self._casts, self._adding)) * one))
        feed_forward = element * (2 * wide if self._gated else wide + hidden)
        (_, fresh) = self._matrices()[1]
        return self._small + max(
            feed_forward + max(element * fresh, 4 * hidden),
            element * (wide + hidden) + made[1],
            12 * hidden + made[0],
        )

    def _packed_block(self) -> int:
        model = self._model
        hidden, keys, wide = self._sizes()
        half, element, inputs = self._half, self._element, self._inputs
        attention, feed_forward = self._matrices()
        # The feed-forward's activation and its gradient, in float32.
        activation = (38 if half else 32) if self._gated else 16
        own = 2 * hidden * half
        scratch = min(self._padded(model.ffn), AT_ONCE)
        padding = element * self._padded(model.ffn) * (model.ffn % BLOCK > 0)
        packing = scratch * (_ENCODING + 4 * half) + padding
        heads = min(self._padded(model.hidden), AT_ONCE)
        pads = element * self._padded(model.hidden) * (model.hidden % BLOCK > 0)
        # Heads are packed before the block has made its later tensors, which it then does not hold yet.
        sizes = stored_bytes(model, self._training, self._storage)
        later = sizes.norm_input // 2 + sizes.ffn_input + sizes.attention_output
        places = [
            activation * wide + 4 * hidden,
            element * ((inputs + 1) * wide + hidden) + own + _DECODING * scratch + padding,
            element * ((inputs + 1) * wide + hidden) + packing,
            element * 2 * (hidden + 2 * keys) + heads * (_ENCODING + 4 * half) + pads - later,
            element * (inputs * wide + 2 * hidden + sum(feed_forward)) + own,
            self._attention() + element * attention[1],
        ]
        # A norm's gradient, with two more tensors if it has a bias, beside the weight gradients of its half.
        norms = (29 if half else 34) * hidden - 8 * hidden * (not self._family.norm_has_bias)
        for into, out in (attention, feed_forward):
            fresh = self._weight * (into + out)
            added = fresh + int(self._adding * self._largest(into, out))
            places += [
                norms + element * (into + out),
                16 * hidden + max(added, fresh + 2 * self._casts * into),
            ]
        return self._small + max(places)

    def _attention(self) -> int:
        """Gradients, rotary's products in float32, keys and values repeated."""
        storage, shared = self._storage, self._model.hidden - self._family.kv_width(self._model)
        again = RECOMPUTE in (storage.attention, storage.attention_output)
        if self._half:
            return self._tokens * (24 * self._model.hidden + 4 * shared)
        return self._tokens * ((40 if again else 32) * self._model.hidden + 8 * shared)

    def _padded(self, width: int) -> int:
        """Elements of rows of this width, padded."""
        return self._tokens * (-(-width // BLOCK) * BLOCK)

    # ---- the ends

    def head(self) -> int:
        """The head's backward: at the gradient of logarithms, or of its weight."""
        model, tokens = self._model, self._tokens
        matrix = model.vocab * model.hidden
        copies = 2 * matrix * self._casts
        logits = tokens * model.vocab
        # Logits in float32, their logarithms and gradient; the norm's input and result.
        loss = 12 * logits + copies + tokens * (self._element + 6) * model.hidden
        # The gradient of logits is there when the weight's is made, and gone when that is cast and added.
        made = (4 + 2 * self._half) * logits + self._element * matrix
        fresh = int((self._weight + max(2.0 * self._casts, self._adding)) * matrix)
        weight = max(made, fresh) + copies
        return self._small + max(loss, weight + tokens * (self._element + 8) * model.hidden)

    def head_forward(self) -> int:
        """The head going forward: logits as computed and in float32, their logarithms; the norm's input and
        result."""
        logits = self._tokens * self._model.vocab
        copies = 2 * self._model.vocab * self._model.hidden * self._casts
        logits_there = (8 + 2 * self._half) * logits
        return self._small + logits_there + copies + self._tokens * (self._element + 6) * self._model.hidden

    @property
    def has_pieces(self) -> bool:
        """The head's logits are never all there."""
        return head_piece(self._tokens, self._model.vocab) < self._tokens

    def embedding(self) -> int:
        """Its gradient, made and added, when the microbatch's blocks have nothing left."""
        matrix = self._model.vocab * self._model.hidden
        made = 4 + self._adding + 2 * (self._weight == 2)
        return self._small + int(made * matrix) + 8 * self._tokens * self._model.hidden


def at_work(
    config: RunConfig, storage: Storage, units: Sequence[str], devices: Devices
) -> tuple[int, int] | None:
    """What is allocated at most beside all that blocks keep, and at the end of a microbatch's backward beside
    what others' keep, 0 without an embedding. None where that was not measured: only of one CPU it was."""
    if not (devices.on_cpu and devices.count == 1 and CpuWork.covers(config, storage)):
        return None
    work = CpuWork(config, storage)
    if HEAD in units and work.has_pieces:
        return None
    most = max(work.block(), work.head() if HEAD in units else 0)
    return most, work.embedding() if EMBED in units else 0
