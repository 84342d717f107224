"""What one device of a node holds and computes for a stage, in bytes, from shapes. This module imports no
torch.

Sizes are divided by the same functions as in the model. Tensor parallelism divides the projections of blocks
and what is computed inside them. Embedding, norms and head are whole on every device. Between blocks each
device has its share of the positions. Data parallelism divides only a microbatch's samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from kernels.blockfloat.layout import packed_bytes
from kernels.common.devices import of_arithmetic
from kernels.experts.unpacking import unpacked_at_once
from kernels.fp8.layout import BLOCK
from node.config.schema import LoraSection, ModelSection, RunConfig, TrainingSection
from node.model.families.known import family_of
from node.model.lora_shapes import WHOLE, largest_projection, targets
from node.model.optimizers import UpdateRule, form_of, update_rules
from node.model.page_locked import GRADIENT_PIECE, STATE_PIECE, in_pieces, page_locked
from node.model.shard_shapes import frozen_bytes, trained_parameters
from node.model.storage import (
    AS_COMPUTED,
    OUTLIERS_APART,
    PACKED,
    RECOMPUTE,
    Storage,
    head_piece,
)
from node.model.units import EMBED, HEAD, block_name, is_block, parameter_specs
from node.schedule.placement import longest_slice, slices_of
from wire.identity.enrolment import CPU, MPS, Hardware

_GRADIENT_BYTES = 1 + 1 / BLOCK
"""Bytes per gradient element in e4m3 (`kernels.fp8.reference`): its code and its share of a block's
exponent."""
MULTIPROCESSORS = 192
"""No GPU has more multiprocessors."""
OWN_ATTENTION_WIDTHS = (64, 128)
"""Head widths that our own attention backward supports."""
KEY_SUMS = 2 * 4 * 2 * 512 * 128
"""Bytes, per element of a head, of the float32 gradients of keys and values by parts of the query heads that
share them: at most twice as many blocks of 128 keys as `kernels.attention.triton.ENOUGH_PROGRAMS`."""
WORKSPACES = 2 * (32 << 20) + (1 << 20)
"""cuBLAS workspaces on a GPU, one for the forward thread and one for autograd's (`CUBLAS_WORKSPACE_CONFIG`,
`node.stage.machine_info.fix_order`); and small tensors."""
_PIECES_THERE = 3
"""The piece that is updated, the next one and the previous one."""
PAGE = 20 << 20
"""The bytes that torch maps of a GPU's memory at a time for tensors over 1 MiB, if its segments are
expandable."""
RUNS_KEPT = 2
"""How many contiguous regions a block's kept tensors occupy. Freed temporaries of its forward separate
them."""
RUNS_AT_WORK = 8
"""How many regions a block at work occupies, together with the tensors that return from host memory."""
_LOST_SHARE = 8
"""Gaps are left by freed tensors, so they are at most 1 / `_LOST_SHARE` of what is kept."""
_HEAD_NUMBERS = 128
"""Bytes per token on a GPU for its label, its loss and the norm's divisor, rounded up."""
GIB = 1 << 30
SNAPSHOTS_SENT = 2
"""The most snapshot copies that a node holds: one being sent over a slow link, and the next."""


def available_bytes() -> int:
    """Bytes of main memory that programs may still take; 0 if the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    sizes = dict(line.split(":", 1) for line in lines if ":" in line)
    kilobytes = sizes.get("MemAvailable", "0").split()
    return 1024 * int(kilobytes[0])


@dataclass(frozen=True, kw_only=True)
class Devices:
    """The devices that compute a stage at one node."""

    count: int = 1
    tensor_parallel: int = 1
    """How many devices share each block."""
    on_cpu: bool = True
    """They compute in main memory, which also holds snapshot copies, and by the kernels' references, which
    need more intermediate tensors than a GPU's kernels."""
    host_bytes: int = 0
    """Main memory for what each device moves there. It is 0 on CPUs, which compute in that memory."""
    multiprocessors: int = MULTIPROCESSORS
    """An upper bound for a GPU. The memory of FlashAttention's backward depends on it."""
    has_own_attention: bool = False
    """The GPU has our own attention backward, which needs no separate sums
    (`kernels.attention.ops.has_fixed_order_kernels`)."""

    @property
    def rows(self) -> int:
        """How many shares of a microbatch's samples there are."""
        return self.count // self.tensor_parallel

    def captures(self, config: RunConfig) -> bool:
        """Whether passes are CUDA graphs (`node.stage.captured_passes`)."""
        graphs = config.training.cuda_graphs and slices_of(config) == 1
        return graphs and not self.on_cpu and self.count == 1


def devices_of(hardware: Hardware) -> Devices:
    return Devices(
        # Whole gibibytes, because the coordinator caches its estimates by kind of device.
        host_bytes=hardware.host_bytes // GIB * GIB,
        count=hardware.devices,
        tensor_parallel=hardware.tensor_parallel,
        # A Mac's GPU counts as a CPU: it runs plain torch in main memory.
        on_cpu=hardware.device in (CPU, MPS),
        has_own_attention=of_arithmetic(hardware.arithmetic).own_attention,
    )


class Share:
    """What one of a node's devices holds and computes. All sizes are in bytes."""

    def __init__(self, config: RunConfig, devices: Devices, storage: Storage) -> None:
        self._config = config
        self._model: ModelSection = config.model
        self._family = family_of(config.model)
        self._training: TrainingSection = config.training
        self._lora: LoraSection = config.lora
        self._sums_tied_gradients = config.sums_tied_gradients
        self._devices = devices
        self._storage = storage
        self._row_tokens = config.training.microbatch * longest_slice(config) // devices.rows
        """The tokens of a microbatch, or of its longest slice, in the row of devices that shares blocks."""
        self._tokens = self._row_tokens // devices.tensor_parallel
        self._is_limited = config.model.window > 0 or config.data.separate_documents
        """Some tokens do not see all earlier ones."""
        self._local = config.sync.every > 1
        self._outer = config.has_outer_momentum
        self._half = config.training.precision != "float32"
        self._coded = config.training.compute == "fp8"
        fused = self._half and not devices.on_cpu and config.model.is_plain and config.lora.rank == 0
        fused = fused or self._coded or config.model.experts > 0
        self.plain = storage.is_off and not fused
        """Whether autograd decides what is kept. GPUs in half precision run the fused halves of a block;
        mixtures do so everywhere."""
        self.captures = devices.captures(config)
        self._element = 2 if self._half else 4
        """Bytes per element of the projections' results."""

    @property
    def residual(self) -> int:
        """The hidden states of one microbatch at this device's positions, in float32."""
        return 4 * self._tokens * self._model.hidden

    # ---- weights and what belongs to them

    def state(self, units: Sequence[str]) -> int:
        """Weights, gradients and moments of these units. Frozen weights have neither gradients nor
        moments."""
        training, devices = self._training, self._devices
        weight = 2 if training.weights == "bfloat16" else 4
        gradient = _GRADIENT_BYTES if training.gradients == "fp8" else 4  # float32, whatever the weights are
        ranks = devices.tensor_parallel
        total = float(sum(frozen_bytes(self._model, self._lora, unit, ranks) for unit in units))
        for elements, is_matrix, is_sharded, rule in self._parameters(units):
            moments = rule.stored_bytes(training, is_matrix=is_matrix)
            total += elements * (moments + (weight + gradient if is_matrix else 8))
            if (
                is_matrix
                and training.gradients == "fp8"
                and (devices.rows if is_sharded else devices.count) > 1
            ):
                # The buffers that the all-reduce sends and receives.
                total += 2 * _GRADIENT_BYTES * elements
            if self._local and devices.on_cpu:
                # The state at the beginning of a round, and the outer optimizer's momentum, are in main
                # memory.
                total += elements * 4 * (1 + len(rule.moments) + self._outer)
        codes = sum(2 * n for unit in units if self._coded and is_block(unit) for n in self._matrices(unit))
        return int(total) + codes + (self._copies(units) if self.captures else 0)

    def moments(self, units: Sequence[str]) -> int:
        """The moments of matrices, which may be in host memory instead."""
        training = self._training
        return int(sum(n * rule.stored_bytes(training, is_matrix=True) for n, rule in self._stepped(units)))

    def moments_on_host(self, units: Sequence[str]) -> int:
        """The size of these moments in host memory."""
        total = 0
        for n, rule in self._stepped(units):
            in_pieces = 0 if rule.needs_whole else n // STATE_PIECE * STATE_PIECE
            for moment in rule.moments:
                first, *rest = form_of(self._training, moment, is_matrix=True)
                whole = int(first.bytes_each)
                last = page_locked((n - in_pieces) * whole)
                small = sum(part.bytes_each for part in rest)
                total += in_pieces * whole + last + 2 * int(n * small)
        return total

    def block_weights(self, block: str) -> int:
        """The weights of a block's matrices, which may be in host memory instead. With adapters they are the
        frozen ones."""
        if self._lora.rank:
            ranks = self._devices.tensor_parallel
            vectors = [spec for spec in parameter_specs(self._model, block) if len(spec.shape) == 1]
            kept = frozen_bytes(self._model, self._lora, block, ranks)
            return kept - sum(4 * prod(spec.shard_shape(ranks)) for spec in vectors)
        return (2 if self._training.weights == "bfloat16" else 4) * sum(self._matrices(block))

    def block_gradients(self, block: str) -> int:
        """The main gradients of a block's matrices."""
        gradient = _GRADIENT_BYTES if self._training.gradients == "fp8" else 4
        return int(gradient * sum(self._matrices(block)))

    def block_codes(self, block: str) -> int:
        """The codes of a block's weights for products in FP8, one set for each direction."""
        return 2 * sum(self._matrices(block)) if self._coded else 0

    def in_host_pieces(self, size: int, block: str) -> int:
        """The most host memory that `size` bytes of a block's matrices take."""
        matrices = [spec for spec in parameter_specs(self._model, block) if len(spec.shape) >= 2]
        # A weight's codes and their scales are four tensors.
        return size + 4 * len(matrices) * in_pieces(0)

    @property
    def holds_copies(self) -> bool:
        """Whether autocast holds a copy of every weight in half precision while a forward runs."""
        in_half = self._half and self._training.weights != "bfloat16"
        return self.plain and in_half and self._lora.rank == 0

    def gradients(self, units: Sequence[str]) -> int:
        """A copy of these units' main gradients."""
        matrix = _GRADIENT_BYTES if self._training.gradients == "fp8" else 4
        return int(sum(n * (matrix if is_matrix else 4) for n, is_matrix, _, _ in self._parameters(units)))

    @property
    def on_cpu(self) -> bool:
        return self._devices.on_cpu

    def _copies(self, units: Sequence[str]) -> int:
        """Autocast's copies of the projections' weights. Frozen weights are cast where they are used, and
        weights of products in FP8 are coded, once for each direction."""
        if not self._half or self._training.weights == "bfloat16" or self._lora.rank:
            return 0
        projecting = [unit for unit in units if unit != EMBED and not (self._coded and is_block(unit))]
        return sum(2 * elements for unit in projecting for elements in self._matrices(unit))

    def block_copies(self) -> int:
        """Autocast's copies of one block's weights."""
        return self._copies([block_name(0)])

    def _matrices(self, unit: str) -> list[int]:
        """The elements of each of a unit's matrices."""
        return [elements for elements, _ in self._stepped([unit])]

    def snapshot(self, units: Sequence[str]) -> int:
        """Copies of these units' whole state for snapshots, however it is divided, and one layer as a
        file."""
        if not self._devices.on_cpu:
            return 0
        # All of it counts as float32; moments in e4m3 take less.
        sizes = [
            sum(4 * n * (1 + len(rule.moments) + self._outer) for n, _, _, rule in self._of_unit(unit, 1))
            for unit in units
        ]
        return SNAPSHOTS_SENT * sum(sizes) + max(sizes)

    def rotary(self) -> int:
        """A chunk's sine and cosine tables."""
        model = self._model
        return 2 * 4 * model.sequence * model.hidden // model.heads if self._family.rotates else 0

    def new_gradients(self, units: Sequence[str]) -> int:
        """Gradients that are not yet added to the main ones: one matrix's, or those that backward of half a
        packed block returns at once."""
        half, packed = self._training.weights == "bfloat16", self._training.gradients == "fp8"
        # A CPU also needs them in float32: unpacked, added to and packed again. A bf16 gradient is converted
        # when it is added.
        more = (12 if packed else 4 * half) if self._devices.on_cpu else 0
        largest = self._largest_matrix(units)
        together = largest if self.plain else max(largest, self._returned())
        return (2 if half else 4) * together + more * largest

    def _returned(self) -> int:
        """The elements of the gradients that backward of the larger half returns, or with adapters of both
        halves. GPUs add the gradients of each product, of projections with the same input, to the main
        gradients at once."""
        model = self._model
        if self._lora.rank:
            return sum(self._matrices(block_name(0)))
        feed_forward = (len(self._family.ffn_inputs) + self._devices.on_cpu) * model.ffn
        if model.experts:
            # The gradients of all experts' matrices exist at once, because no product accumulates them.
            feed_forward = (len(self._family.ffn_inputs) + 1) * model.ffn * model.experts
        attention = 2 * model.hidden + 2 * self._family.kv_width(model)
        return max(feed_forward, attention) * model.hidden // self._devices.tensor_parallel

    def applying(self, units: Sequence[str]) -> int:
        """The most that is allocated besides the state after the backwards: by the exchange of a tied
        gradient, the norm, or the optimizer's step."""
        return max(self._tied_exchange(units), self._norm(units), self._step(units))

    def applying_streamed(self, units: Sequence[str]) -> int:
        """As `applying`, for an optimizer whose moments are in host memory."""
        return max(self._tied_exchange(units), self._norm(units), self._streamed_step(units))

    def _streamed_step(self, units: Sequence[str]) -> int:
        vectors = 4 * sum(n for n, is_matrix, _, _ in self._parameters(units) if not is_matrix)
        pieces = self._streamed(self._stepped(units))
        sizes = (n * rule.stored_bytes(self._training, is_matrix=True) for n, rule in pieces)
        largest = max(sizes, default=0.0)
        steps = self._streamed(self._worked_on(units))
        return int(_PIECES_THERE * largest) + self._beside(steps) + self._gathered(units) + vectors

    @staticmethod
    def _streamed(matrices: Sequence[tuple[int, UpdateRule]]) -> list[tuple[int, UpdateRule]]:
        """The elements of each matrix that are updated at a time."""
        return [(n if rule.needs_whole else min(n, STATE_PIECE), rule) for n, rule in matrices]

    def _beside(self, steps: Sequence[tuple[int, UpdateRule]]) -> int:
        """What steps of matrices or pieces with these element counts allocate."""
        sizes: dict[UpdateRule, list[int]] = {}
        for elements, rule in steps:
            sizes.setdefault(rule, []).append(elements)
        on_cpu = self._devices.on_cpu
        return max(
            (rule.step_bytes(self._training, n, on_cpu=on_cpu) for rule, n in sizes.items()), default=0
        )

    def _tied_exchange(self, units: Sequence[str]) -> int:
        """The sum and its packed form, or both shares. In e4m3 also the piece that is being processed."""
        model, packed = self._model, self._training.gradients == "fp8"
        ends = (EMBED in units) + (HEAD in units)
        # Two float32 gradients at the same stage are added in place.
        if not self._sums_tied_gradients or ends == 0 or (ends == 2 and not packed):
            return 0
        matrix = model.vocab * model.hidden
        return 2 * 4 * matrix + (6 * min(matrix, GRADIENT_PIECE) if packed else 0)

    def _norm(self, units: Sequence[str]) -> int:
        """An unpacked piece, and on a CPU its float64 copy."""
        unpacked = 4 if self._training.gradients == "fp8" else 0
        wide = 8 if self._devices.on_cpu else 0
        return (wide + unpacked) * min(self._largest_matrix(units), GRADIENT_PIECE)

    def _step(self, units: Sequence[str]) -> int:
        return self._beside(self._worked_on(units)) + self._gathered(units)

    def _worked_on(self, units: Sequence[str]) -> list[tuple[int, UpdateRule]]:
        """As `_stepped`, but a matrix that is gathered from tensor-parallel ranks counts with all its
        elements."""
        ranks = self._devices.tensor_parallel
        return [
            (n * ranks if is_sharded and rule.needs_whole else n, rule)
            for n, is_matrix, is_sharded, rule in self._parameters(units)
            if is_matrix
        ]

    def _gathered(self, units: Sequence[str]) -> int:
        """The memory for gathering a matrix: what all ranks sent, and the whole matrix in order."""
        whole = (
            n * self._devices.tensor_parallel
            for n, is_matrix, is_sharded, rule in self._parameters(units)
            if is_matrix and is_sharded and rule.needs_whole
        )
        return 2 * 4 * max(whole, default=0)

    def _parameters(self, units: Sequence[str]) -> list[tuple[int, bool, bool, UpdateRule]]:
        """`trained_parameters` of all these units, each with its update rule."""
        ranks = self._devices.tensor_parallel
        return [parameter for unit in units for parameter in self._of_unit(unit, ranks)]

    def _of_unit(self, unit: str, ranks: int) -> list[tuple[int, bool, bool, UpdateRule]]:
        trained = trained_parameters(self._model, self._lora, unit, ranks)
        rules = update_rules(self._config, unit)
        return [(*shape, rule) for shape, rule in zip(trained, rules, strict=True)]

    def _stepped(self, units: Sequence[str]) -> list[tuple[int, UpdateRule]]:
        """The elements and the rule of each matrix."""
        return [(n, rule) for n, is_matrix, _, rule in self._parameters(units) if is_matrix]

    def _largest_matrix(self, units: Sequence[str]) -> int:
        return max((n for n, _ in self._stepped(units)), default=0)

    # ---- activations

    def pages(self, size: int, runs: int) -> int:
        """What the allocator holds besides tensors of `size` bytes in `runs` contiguous regions.

        At both ends of a region a page is partly filled, on average half of it. Larger tensors cannot use the
        rest. On a CPU no memory is held back.
        """
        return 0 if self.on_cpu else min(runs * PAGE, size // _LOST_SHARE)

    def past_keys(self) -> int:
        """A slice's keys and values in one block, in the form that later slices read; 0 without slices."""
        tokens, width = self._row_tokens, self._family.kv_width(self._model)
        if slices_of(self._config) == 1:
            return 0
        if (bits := PACKED.get(self._storage.attention)) is None:
            size = self._element * tokens * width
        else:
            size = packed_bytes((tokens, width), bits)
        return 2 * size // self._devices.tensor_parallel

    def past_work(self, blocks: int) -> int:
        """The gradients of a sample's keys and values in these blocks, in float32, and concatenated keys and
        values of the block at work; 0 without slices."""
        return 2 * (4 * blocks + self._element) * self._sample_keys()

    def _sample_keys(self) -> int:
        """The elements of a microbatch's keys in one block; 0 without slices."""
        if slices_of(self._config) == 1:
            return 0
        tokens = self._training.microbatch * self._model.sequence // self._devices.rows
        return tokens * self._family.kv_width(self._model) // self._devices.tensor_parallel

    def autograd_keeps(self) -> int:
        """What autograd saves of one block and microbatch if nothing is packed."""
        model, element, ranks = self._model, self._element, self._devices.tensor_parallel
        family = self._family
        # Two norms: the input, the divisor, and the mean that LayerNorm subtracts.
        own = 2 * (4 * model.hidden + (8 if family.norm_has_bias else 4))
        if self._devices.on_cpu and not family.norm_has_bias:
            own += 2 * 4 * model.hidden  # on a CPU torch also keeps the input of RMSNorm's scaling
        # The norms' results at all positions. Autocast casts one for each projection that reads it.
        entered = len(family.attention_inputs) + len(family.ffn_inputs)
        copies = entered if self._half and ranks == 1 else 2
        if self._lora.rank:
            copies = self._adapted_inputs()
        wide = copies * element * model.hidden
        # Inside a block a device has its share of heads and of the feed-forward's width. This counts queries,
        # keys, values, attention's result and log-sum-exp, and what the feed-forward keeps.
        keys = model.hidden if self._repeats_keys else self._family.kv_width(model)
        inside = element * (2 * model.hidden + 2 * keys) + 4 * model.heads
        inside += self._feed_forward_keeps
        # Autocast's copies of weights belong to each microbatch's graph, unless they are made once per step.
        weights = 0 if self.captures else self._copies(["block.0000"])
        # The results of adapters' first matrices.
        inside += element * self._lora.rank * len(targets(model, self._lora)) if self._lora.rank else 0
        return self._tokens * own + self._row_tokens * wide + self._row_tokens * inside // ranks + weights

    @property
    def _feed_forward_keeps(self) -> int:
        """What autograd saves of the feed-forward for one token: gate, its SiLU, up and the product, or up
        and its GELU. A projection without an adapter saves nothing."""
        saved = 2 * len(self._family.ffn_inputs)
        if self._lora.rank and self._family.ffn_output not in targets(self._model, self._lora):
            saved -= 1
        return self._element * saved * self._model.ffn

    def _adapted_inputs(self) -> int:
        """The copies of norms' results that projections with adapters save. Autocast casts one for each."""
        adapted = targets(self._model, self._lora)
        groups = self._family.attention_inputs, self._family.ffn_inputs
        counts = [sum(name in adapted for name in names) for names in groups]
        return sum(counts) if self._half else sum(count > 0 for count in counts)

    @property
    def follows_kernels(self) -> bool:
        """Whether a single device runs fused halves in bfloat16. Then the memory of each operator follows
        from shapes."""
        alone = self._devices.tensor_parallel == 1 and not (self._devices.on_cpu or self.captures)
        plain = self._model.is_plain and self._lora.rank == 0 and not self.plain
        coded = self._coded or self._training.weight_gradients == "fp8" or self._restored() > 0
        return alone and plain and not coded and self._half and self._training.weights == "bfloat16"

    def block_work(self, units: Sequence[str], *, last: bool = True) -> int:
        """The bytes allocated while a block is at work, in addition to what blocks keep.

        They include fresh gradients of its matrices. A chunk's last block reads the gradient that the stage
        received; other blocks' gradients are the stage's own.
        """
        if not self.follows_kernels:
            return self.block_at_work() + self.new_gradients(units)
        hidden, keys = self._model.hidden, self._family.kv_width(self._model)
        back, attention = self._feed_forward_back(), 2 * (2 * hidden + 2 * keys) * hidden
        feed_forward = max(back, self._feed_forward()) if last else back + self.residual
        return max(feed_forward, self._attention_at_work() + attention)

    def block_again(self, units: Sequence[str], block: int) -> int:
        """`block_work` for a block that runs again and then keeps `block` bytes."""
        # What the block keeps includes its input, unless that is packed.
        same = self.follows_kernels and self._storage.norm_input == AS_COMPUTED
        return block + self.block_work(units) + (0 if same else self.residual)

    def ends_work(self, units: Sequence[str]) -> int:
        """The bytes at work for the head, or for the embedding if it is counted separately; 0 without
        them."""
        if HEAD in units and not (self._devices.on_cpu or self.captures):
            return self._fused_head()
        if HEAD in units:
            return self.head_at_work() + self.new_gradients(units)
        return self.residual + self.new_gradients(units) if EMBED in units and self.follows_kernels else 0

    def _feed_forward_back(self) -> int:
        """The most that kernels hold at a time in the backward of a feed-forward.

        All of it holds the norm's result and the residual stream's gradient in half precision. First come the
        activation, the gradients of its inputs and the recomputed inputs; then a fresh gradient of the output
        matrix; then the inputs' gradients and those of the input matrices.
        """
        inputs, wide, narrow = self._feed_forward_sizes()
        matrix = 2 * self._model.ffn * self._model.hidden
        again = inputs * (self._storage.ffn_input == RECOMPUTE)
        most = max((1 + inputs) * wide + matrix, inputs * (wide + matrix))
        return 2 * narrow + max((1 + inputs + again) * wide, most)

    def _feed_forward(self) -> int:
        """The most that kernels hold in the forward of a feed-forward, before the block's result exists.

        These are the inputs, the activation and the half's result, and the half's input if it is not kept.
        """
        inputs, wide, narrow = self._feed_forward_sizes()
        return (1 + inputs) * wide + narrow + self.residual * (self._storage.norm_input != AS_COMPUTED)

    def _feed_forward_sizes(self) -> tuple[int, int, int]:
        """The number of the activation's inputs; the bytes of one input, and of hidden states in half
        precision."""
        token = self._element * self._row_tokens
        return len(self._family.ffn_inputs), token * self._model.ffn, token * self._model.hidden

    def block_at_work(self) -> int:
        """What a block's backward allocates besides the saved tensors."""
        largest = max(self.feed_forward_at_work(), self._attention_at_work())
        # Between ranks: what one sends and receives, and both in another order.
        exchanged = 6 * 4 * self._row_tokens * self._model.hidden if self._devices.tensor_parallel > 1 else 0
        return largest + exchanged + self._adapting() + self._restored()

    def _restored(self) -> int:
        """A norm's restored input, which kernels cannot read directly if outlier channels are stored
        apart."""
        return self.residual if self._storage.norm_input == OUTLIERS_APART else 0

    def _adapting(self) -> int:
        """A frozen matrix in the form that is multiplied, and dropout's result. If autograd keeps the inputs,
        dropout's result exists at the peak, on a CPU with random bits and mask."""
        if self._lora.rank == 0:
            return 0
        kept_as_computed = self._lora.base == ("bf16" if self._half else WHOLE)
        # Unpacking on a CPU goes through float32.
        unpacked = self._element + (
            4 if self._devices.on_cpu and self._lora.base not in (WHOLE, "bf16") else 0
        )
        ranks = self._devices.tensor_parallel
        weight = 0 if kept_as_computed else unpacked * largest_projection(self._model) // ranks
        rows = self._row_tokens * max(self._model.experts_per_token, 1)
        if self._model.experts and weight and not self._devices.on_cpu:
            weight *= max(1, unpacked_at_once(self._model.experts, weight, rows))
        wide = rows * max(self._model.hidden, self._model.ffn // ranks)
        if not self.plain:
            return weight + self._element * wide
        dropped = 8 * self._devices.on_cpu + 2 * self._element if self._lora.dropout else 0
        return weight + (dropped + 2 * self._element) * wide

    def _routed_at_work(self) -> int:
        """A mixture's backward.

        For each row of a token and expert: the gradients of result and input, and the activations with their
        gradients and inputs, one of them in float32. For each token: the router's results in float32, the
        norm's result and its gradient. Forward casts float32 weights of all experts of a projection.
        """
        model, element = self._model, self._element
        # On a CPU the references compute in float32.
        wider = 4 * self._devices.on_cpu * (3 * (self._storage.ffn_input in PACKED) + 6 * self._half)
        width = model.ffn // self._devices.tensor_parallel
        row = 2 * element * model.hidden + (7 * element + 4 + wider) * width
        token = model.experts_per_token * row + 6 * 4 * model.experts + 4 * element * model.hidden
        whole = self._training.weights if self._lora.rank == 0 else self._lora.base
        casts = self._half and whole == WHOLE
        return self._row_tokens * token + 2 * casts * model.experts * width * model.hidden

    def feed_forward_at_work(self) -> int:
        """The feed-forward's backward. Plain: gradients of two tensors of its width. Packed: these and their
        inputs, unpacked.

        A GPU's kernels read packed tensors. They need the activation's gradient and those of its inputs,
        which may be recomputed, the norm's result, and the residual stream's gradient in float32 and in the
        products' dtype.
        """
        model, ranks = self._model, self._devices.tensor_parallel
        if model.experts:
            return self._routed_at_work()
        wide = narrow = 2 if self.plain else 4
        element = self._element
        if not self.plain and not self._devices.on_cpu and model.is_plain and self._lora.rank == 0:
            wide = 1 + len(self._family.ffn_inputs) * (2 if self._storage.ffn_input == RECOMPUTE else 1)
        if self._devices.on_cpu and self._half:
            wide, narrow = 3, 3
        if self._devices.on_cpu and not self.plain:
            # The references compute in float32, with one input for GELU or two for SwiGLU.
            wide, narrow, element = 3 * (1 + len(self._family.ffn_inputs)), 2, 4
        # The codes of the gradients of the widest product's outputs.
        codes = (2 * model.ffn // ranks + model.hidden) if self._coded else 0
        if self._training.weight_gradients == "fp8":
            # Also the codes of both operands of the last projection's weight gradient.
            codes += model.ffn // ranks + model.hidden
        return self._row_tokens * (element * (wide * model.ffn // ranks + narrow * model.hidden) + codes)

    @property
    def _has_flash(self) -> bool:
        """Whether GPUs have FlashAttention for this shape, as `kernels.attention.ops.has_flash`. Cards before
        sm80 have none, and some have none for heads of 193 to 224."""
        width = self._model.hidden // self._model.heads
        return self._half and width % 8 == 0 and width <= 256 and not 192 < width <= 224

    @property
    def _has_own_attention(self) -> bool:
        """As `kernels.attention.ops.has_fixed_order_kernels`, if every token sees all earlier ones."""
        if not (self._devices.has_own_attention and self._half and self._training.deterministic):
            return False
        return self._model.width in OWN_ATTENTION_WIDTHS and not self.plain and not self._is_limited

    @property
    def _repeats_keys(self) -> bool:
        """Whether keys and values are repeated for every query head: on a GPU without FlashAttention."""
        return not (self._devices.on_cpu or self._has_flash)

    def _attention_at_work(self) -> int:
        """What attention's half of a block allocates in backward.

        Deterministic FlashAttention keeps float32 copies of the queries' gradients, one for each group of
        multiprocessors. Besides these there are the gradients, those of keys and values for every head, the
        unpacked tensors, and the block's own gradients.
        """
        model, ranks, element = self._model, self._devices.tensor_parallel, self._element
        keys, by_parts = self._family.kv_width(model), 0
        if self._devices.on_cpu:
            return self._row_tokens * self._attention_on_cpu() // ranks
        shared = keys < model.hidden
        a_token = element * (4 * model.hidden + 2 * keys * shared)
        if self._has_own_attention:
            # Afterwards, the projections' gradients side by side, and the first norm's result and its
            # gradient.
            a_token = element * (4 * model.hidden + 4 * keys)
            if shared:
                queries = model.heads * model.width
                by_parts = min(2 * 4 * self._row_tokens * queries // ranks, KEY_SUMS * model.width)
        elif self._has_flash:
            samples = self._training.microbatch // self._devices.rows
            copies = -(-self._devices.multiprocessors * ranks // (samples * model.heads))
            a_token += 4 * copies * model.hidden
        elif not self.plain:
            # Forward runs again, with keys and values repeated.
            a_token += element * (model.hidden + 2 * model.hidden * shared)
        if self.plain:
            # By now autograd has freed what it saved of the feed-forward.
            a_token -= self._feed_forward_keeps
        else:
            as_kept = (AS_COMPUTED, "bf16") if self._half else (AS_COMPUTED,)
            for form, width in (
                (self._storage.attention, model.hidden + 2 * keys),
                (self._storage.attention_output, model.hidden),
            ):
                a_token += element * width * (form not in as_kept)
        return by_parts + self._row_tokens * (max(0, a_token) // ranks + 2 * element * model.hidden)

    def _attention_on_cpu(self) -> int:
        """Bytes per token, as measured: gradients, rotary's products in float32, and repeated keys and
        values."""
        model, storage = self._model, self._storage
        if storage.is_off:
            return 12 * model.hidden
        if self._half:
            return 24 * model.hidden
        again = RECOMPUTE in (storage.attention, storage.attention_output)
        return (40 if again else 32) * model.hidden + 4 * (model.hidden - self._family.kv_width(model))

    def head_at_work(self) -> int:
        """What a head on a CPU holds besides fresh gradients: logits, their logarithms and gradient, the
        norm's input and result. With CUDA graphs: what backward allocates."""
        if self.captures:
            return self._head(0)
        head = self._head(self._of_a_logit()) + self._copies([HEAD]) + self._dense_head()
        # As large as the fresh gradient of the head's weight, which `new_gradients` counts.
        counted = 0 if self._lora.rank else (2 if self._training.weights == "bfloat16" else 4)
        return head + max(0, self._pieced_gradient() - counted * self._model.vocab * self._model.hidden)

    def _fused_head(self) -> int:
        """What a head on a GPU without CUDA graphs holds, with fresh gradients: forward's gradients of weight
        and input, and a piece's logits or the tensors that backward rounds."""
        rows, logits = self._tokens * self._model.hidden, self._piece * self._model.vocab
        matrix = 0 if self._lora.rank else self._model.vocab * self._model.hidden
        forward = self._element * (logits + rows) + self._copies([HEAD]) + self._dense_head()
        backward = 12 * rows + (2 * matrix if self._half else 0)
        return 4 * matrix + self._element * rows + max(forward, backward) + _HEAD_NUMBERS * self._tokens

    def _dense_head(self) -> int:
        """A frozen weight in the dtype of products."""
        dense = self._lora.rank > 0 and self._half == (self._lora.base == WHOLE)
        return self._element * self._model.vocab * self._model.hidden if dense else 0

    def head_keeps(self) -> int:
        """What a CUDA graph of the head's forward holds permanently: a piece's logits, and the gradients that
        forward computes."""
        if not self.captures:
            return 0
        return self._head(self._of_a_logit()) + self._pieced_gradient()

    @property
    def _piece(self) -> int:
        """The number of tokens that pass through the head at a time."""
        return head_piece(self._tokens, self._model.vocab, fused=not self._devices.on_cpu)

    @property
    def _in_pieces(self) -> bool:
        """Whether forward computes the gradients. On a GPU it always does."""
        return not self._devices.on_cpu or self._piece < self._tokens

    def _of_a_logit(self) -> int:
        """Bytes per logit. On a GPU gradients overwrite the logits."""
        if not self._devices.on_cpu:
            return self._element
        return (4 if self._in_pieces else 3) * 4 + (2 if self._half else 0)

    def _pieced_gradient(self) -> int:
        """The gradients that the forward of a head in pieces computes, and on a CPU a piece's product."""
        if not self._in_pieces:
            return 0
        product = 2 if self._half and self._devices.on_cpu else 0
        weight = self._model.vocab * self._model.hidden * (0 if self._lora.rank else 4 + product)
        return weight + self._tokens * 2 * self._element * self._model.hidden

    def _head(self, of_a_logit: int) -> int:
        return self._piece * of_a_logit * self._model.vocab + self._tokens * 3 * 4 * self._model.hidden
