"""How long a stage's parts and copies take on one card: what a memory plan weighs. Torch-free.

`node.stage.block_measure` measures them when a node joins. Without a measurement they follow from operations
at a speed that is typical, which keeps their order and ratio.

`stored_forms` are those that a run's blocks may have; a `PackTime` is what packing into one takes.
"""

import json
from dataclasses import asdict, dataclass, field, replace
from itertools import chain

from node.config.schema import PLANNED, ModelSection, RunConfig, StorageSection
from node.model.families.known import family_of
from node.model.storage import KINDS, PACKED, Storage, configured
from node.model.units import block_name, unit_cost
from node.schedule.placement import slices_of
from node.tuning.device_memory import Devices
from wire.errors import ConfigError

GPU_PACKED, CPU_PACKED = 200e9, 200e6
"""Assumed elements a second that are packed, or unpacked."""


@dataclass(frozen=True, kw_only=True)
class PackTime:
    """Seconds that storing a block's tensors of one kind in few bits adds, for one microbatch."""

    kind: str
    """A kind of tensor, one of `node.model.storage.KINDS`."""
    form: str
    """The form that it is stored in, one of `PACKED`."""
    pack: float
    """Added to a forward."""
    unpack: float
    """Added to a backward."""


def stored_forms(config: RunConfig) -> list[tuple[str, str]]:
    """Kinds and forms in few bits that blocks of this run may be stored in: the run file's own, and those of
    `storage.allow`. Bits by stage may be any."""
    base, section = configured(config.storage), config.storage
    own = ((kind, getattr(base, kind)) for kind in KINDS)
    found = dict.fromkeys(chain(own, allowed_forms(section)))
    if section.bits_by_stage:
        wide = [kind for kind, form in found if form in PACKED and form != "bf16"]
        found |= dict.fromkeys((kind, form) for kind in wide for form in KINDS[kind] if form in PACKED)
    return [(kind, form) for kind, form in found if is_packed(config, kind, form)]


def allowed_forms(section: StorageSection) -> list[tuple[str, str]]:
    """Kinds and forms of `storage.allow`: `kind:form`, or a form alone for both inputs of norms and of
    feed-forwards. Raises ConfigError."""
    found = []
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
            found.append((part, form))
    return found


def is_packed(config: RunConfig, kind: str, form: str) -> bool:
    """Whether this form is another than that in which the tensors are computed."""
    computed = config.training.precision in ("bfloat16", PLANNED) and kind in (
        "attention",
        "attention_output",
    )
    return form in PACKED and not (form == "bf16" and computed)


def assumed_packing(config: RunConfig, tokens: float, *, on_cpu: bool) -> tuple[PackTime, ...]:
    """From elements, at a typical speed of such a device; each form takes as long."""
    widths, rate = family_of(config.model).kept_widths(config.model), CPU_PACKED if on_cpu else GPU_PACKED
    return tuple(
        PackTime(kind=kind, form=form, pack=seconds, unpack=seconds)
        for kind, form in stored_forms(config)
        for seconds in (sum(widths[kind]) * tokens / rate,)
    )


GPU_FLOPS, CPU_FLOPS = 100e12, 100e9
"""Assumed operations a second."""
COPY_RATE = 12e9
"""Assumed bytes a second between a GPU and page-locked memory, each way: PCIe 3 with 16 lanes."""


@dataclass(frozen=True, kw_only=True)
class BlockTimes:
    """Seconds that one block's parts take for one microbatch, and a card's copies."""

    forward: float
    backward: float
    """Of a block in the storage `stored`."""
    attention: float
    """The projections into attention: what recomputing queries, keys and values takes."""
    attention_output: float
    """Attention itself."""
    ffn_input: float
    """The projections into the feed-forward."""
    out_rate: float
    """Bytes a second from the device to host memory, beside compute."""
    in_rate: float
    """Bytes a second from host memory to the device, beside compute."""
    slowing: float = 0.0
    """Seconds that a byte which is copied adds to what is computed beside it."""
    stored: Storage = field(default_factory=Storage)
    packing: tuple[PackTime, ...] = ()
    """Of the kinds and forms that the run file allows."""
    measured: bool = False
    """On the card; else assumed."""

    def recomputing(self, kind: str) -> float:
        """What backward takes longer if it computes this kind again."""
        seconds: float = getattr(self, kind)
        return seconds

    def of_storage(self, storage: Storage) -> "BlockTimes":
        """The same of a block that stores its activations in another way: what its packing takes in place of
        the present one's. Packing whose time is not known counts as free."""
        pack = self._packing(storage, "pack") - self._packing(self.stored, "pack")
        unpack = self._packing(storage, "unpack") - self._packing(self.stored, "unpack")
        # Measured one by one, parts may add up to more than the whole.
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
        fields = json.loads(text)
        stored = {**fields.pop("stored")}
        stored["offload"] = tuple(stored["offload"])
        packing = tuple(PackTime(**row) for row in fields.pop("packing"))
        return cls(**fields, stored=Storage(**stored), packing=packing)

    def _packing(self, storage: Storage, part: str) -> float:
        known = {(time.kind, time.form): float(getattr(time, part)) for time in self.packing}
        return sum(known.get((kind, getattr(storage, kind)), 0.0) for kind in KINDS)


def assumed_times(config: RunConfig, devices: Devices) -> BlockTimes:
    """From operations, at a typical speed of such a card."""
    model = config.model
    # Slices take equally long.
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
    """Operations a token of a block's projections into attention, of attention, and into the feed-forward."""
    into_attention, _, into_ffn, _ = family_of(model).products(model)
    attention = 2.0 * model.q_width * model.sequence  # half of it is masked
    return 2.0 * into_attention.elements, attention, 2.0 * into_ffn.elements
