"""How long a stage's parts and copies take on one card: the input of a memory plan. This module imports no
torch.

`node.stage.block_measure` measures these times when a node joins. Without a measurement they are derived from
operation counts at a typical speed, which keeps their order and ratio.

`stored_forms` are the forms that a run's blocks may have. A `PackTime` is the time for packing into one of
them.
"""

import json
from dataclasses import asdict, dataclass, field, replace
from itertools import chain

from node.config.schema import PLANNED, ModelSection, RunConfig, StorageSection
from node.model.families.known import family_of
from node.model.storage import KINDS, PACKED, Storage, configured
from node.model.units import block_name, unit_cost
from node.schedule.placement import slices_of
from node.telemetry.events import read_value
from node.tuning.device_memory import Devices
from wire.errors import ConfigError

GPU_PACKED, CPU_PACKED = 200e9, 200e6
"""Assumed rates of packing and unpacking, in elements per second."""


@dataclass(frozen=True, kw_only=True)
class PackTime:
    """The seconds that storing a block's tensors of one kind in few bits adds, for one microbatch."""

    kind: str
    """The kind of tensor, one of `node.model.storage.KINDS`."""
    form: str
    """The form that it is stored in, one of `PACKED`."""
    pack: float
    """The seconds added to a forward."""
    unpack: float
    """The seconds added to a backward."""


def stored_forms(config: RunConfig) -> list[tuple[str, str]]:
    """The kinds and packed forms in which blocks of this run may be stored: the run file's own, and those of
    `storage.allow`. With `bits_by_stage`, packed kinds may have any of their forms."""
    base, section = configured(config.storage), config.storage
    own = ((kind, getattr(base, kind)) for kind in KINDS)
    forms = dict.fromkeys(chain(own, allowed_forms(section)))
    if section.bits_by_stage:
        wide = [kind for kind, form in forms if form in PACKED and form != "bf16"]
        forms |= dict.fromkeys((kind, form) for kind in wide for form in KINDS[kind] if form in PACKED)
    return [(kind, form) for kind, form in forms if is_packed(config, kind, form)]


def allowed_forms(section: StorageSection) -> list[tuple[str, str]]:
    """The kinds and forms of `storage.allow`. An entry is `kind:form`, or a form alone for the inputs of
    norms and of feed-forwards.

    Raises:
        ConfigError: an entry names an unknown kind, or a form that the kind does not have.
    """
    forms = []
    for entry in section.allow:
        kind, colon, form = entry.rpartition(":")
        kinds = (kind,) if colon else ("norm_input", "ffn_input")
        for part in kinds:
            if part not in KINDS:
                raise ConfigError(f"storage.allow names {part!r}, which is none of {', '.join(KINDS)}")
            packed = [known for known in KINDS[part] if known in PACKED]
            if form not in packed:
                raise ConfigError(
                    f"storage.allow names {entry!r}: {part} may be stored in {', '.join(packed)}; recompute "
                    "and host memory change no bit, so each node decides on them for itself"
                )
            forms.append((part, form))
    return forms


def is_packed(config: RunConfig, kind: str, form: str) -> bool:
    """Whether this form differs from the one in which the tensors are computed."""
    computed = config.training.precision in ("bfloat16", PLANNED) and kind in (
        "attention",
        "attention_output",
    )
    return form in PACKED and not (form == "bf16" and computed)


def assumed_packing(config: RunConfig, tokens: float, *, on_cpu: bool) -> tuple[PackTime, ...]:
    """Packing times from element counts, at a typical speed of such a device. Every form takes the same
    time."""
    widths, rate = family_of(config.model).kept_widths(config.model), CPU_PACKED if on_cpu else GPU_PACKED
    return tuple(
        PackTime(kind=kind, form=form, pack=seconds, unpack=seconds)
        for kind, form in stored_forms(config)
        for seconds in (sum(widths[kind]) * tokens / rate,)
    )


GPU_FLOPS, CPU_FLOPS = 100e12, 100e9
"""Assumed operations per second."""
COPY_RATE = 12e9
"""Assumed bytes per second between a GPU and page-locked memory, in each direction: PCIe 3 with 16 lanes."""


@dataclass(frozen=True, kw_only=True)
class BlockTimes:
    """The seconds that one block's parts take for one microbatch, and a card's copy rates."""

    forward: float
    backward: float
    """The backward of a block in the storage `stored`."""
    attention: float
    """The projections into attention. Recomputing queries, keys and values takes this long."""
    attention_output: float
    """Attention itself."""
    ffn_input: float
    """The projections into the feed-forward."""
    out_rate: float
    """Bytes per second from the device to host memory, while it computes."""
    in_rate: float
    """Bytes per second from host memory to the device, while it computes."""
    stored: Storage = field(default_factory=Storage)
    """The storage with which `forward` and `backward` were measured."""
    packing: tuple[PackTime, ...] = ()
    """The times of the kinds and forms that the run file allows."""
    measured: bool = False
    """Whether the times were measured on the card. Otherwise they are assumed."""

    def recomputing(self, kind: str) -> float:
        """The seconds that recomputing this kind adds to backward."""
        seconds: float = getattr(self, kind)
        return seconds

    def of_storage(self, storage: Storage) -> "BlockTimes":
        """The times of a block with another storage: its packing replaces the present one's. Packing whose
        time is unknown counts as free."""
        pack = self._packing(storage, "pack") - self._packing(self.stored, "pack")
        unpack = self._packing(storage, "unpack") - self._packing(self.stored, "unpack")
        # Measured one by one, the parts may add up to more than the whole.
        return replace(
            self,
            forward=max(self.forward + pack, self.forward / 2),
            backward=max(self.backward + unpack, self.backward / 2),
            stored=storage,
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "BlockTimes":
        """The inverse of `to_json`."""
        times: BlockTimes = read_value(json.loads(text), cls, "times")
        return times

    def _packing(self, storage: Storage, part: str) -> float:
        known = {(time.kind, time.form): float(getattr(time, part)) for time in self.packing}
        return sum(known.get((kind, getattr(storage, kind)), 0.0) for kind in KINDS)


def assumed_times(config: RunConfig, devices: Devices) -> BlockTimes:
    """Times from operation counts, at a typical speed of such a card."""
    model = config.model
    # All slices take the same time.
    tokens = config.training.microbatch * model.sequence / slices_of(config) / devices.count
    speed = CPU_FLOPS if devices.on_cpu else GPU_FLOPS
    forward = unit_cost(model, block_name(0)) * tokens / speed
    into_attention, attention, into_ffn = (flops * tokens / speed for flops in part_flops(model))
    return BlockTimes(
        forward=forward,
        backward=2 * forward,
        attention=into_attention,
        attention_output=attention,
        ffn_input=into_ffn,
        out_rate=COPY_RATE,
        in_rate=COPY_RATE,
        packing=assumed_packing(config, tokens, on_cpu=devices.on_cpu),
    )


def part_flops(model: ModelSection) -> tuple[float, float, float]:
    """Operations per token of a block's projections into attention, of attention, and of those into the
    feed-forward."""
    into_attention, _, into_ffn, _ = family_of(model).products(model)
    attention = 2.0 * model.q_width * model.sequence  # half of it is masked
    return 2.0 * into_attention.elements, attention, 2.0 * into_ffn.elements
