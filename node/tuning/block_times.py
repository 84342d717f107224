"""How long a stage's parts and copies take on one card: what a memory plan weighs. Torch-free.

`node.stage.block_measure` measures them when a node joins. Without a measurement they follow from operations
at a speed that is typical, which keeps their order and ratio.
"""

import json
from dataclasses import asdict, dataclass, field, replace

from node.config.schema import ModelSection, RunConfig
from node.model.families.known import family_of
from node.model.storage import KINDS, Storage
from node.model.units import block_name, unit_cost
from node.tuning.device_memory import Devices
from node.tuning.pack_times import PackTime, assumed_packing

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
        packing = tuple(PackTime(**one) for one in fields.pop("packing"))
        return cls(**fields, stored=Storage(**stored), packing=packing)

    def _packing(self, storage: Storage, part: str) -> float:
        known = {(one.kind, one.form): float(getattr(one, part)) for one in self.packing}
        return sum(known.get((kind, getattr(storage, kind)), 0.0) for kind in KINDS)


def assumed_times(config: RunConfig, devices: Devices) -> BlockTimes:
    """From operations, at a typical speed of such a card."""
    model = config.model
    tokens = config.training.microbatch * model.sequence / devices.count
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
