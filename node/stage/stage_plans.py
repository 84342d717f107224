"""What a stage takes from the run file or the coordinator's plans: the codecs of tensors and the storage of
activations."""

from collections.abc import Iterable

from kernels.common.random_bits import mixed
from node.config.schema import PLANNED, RunConfig
from node.schedule.placement import boundaries, slices_of
from node.schedule.routing import source_stage
from node.stage.boundary_caches import BoundaryCaches
from node.tuning.codec_plan import Way, of_gradients, to_time
from node.tuning.storage_choice import allowed_storages, chosen_config, name_of
from wire.codecs.base import Codec
from wire.codecs.formats import ladder
from wire.codecs.registry import codec
from wire.errors import ProtocolViolationError
from wire.spec import Direction, TensorKey


class StageCodecs:
    """The codec of each tensor: the run file's, a codec planned for an epoch, or fp32. It belongs to a node,
    whatever its stage."""

    def __init__(self, config: RunConfig, caches: BoundaryCaches | None) -> None:
        """`caches`: the sample caches of activations, for a codec that uses them."""
        raw, first = codec("fp32"), config.pipeline.first_codecs
        self._config = config
        self._caches = caches
        self._raw = raw
        self._codecs: dict[Direction, Codec] = {
            Direction.ACTIVATION: codec(first[0]),
            Direction.GRADIENT: codec(first[1]),
            Direction.TIED_SHARE: raw,
            Direction.TIED_SUM: raw,
        }
        self._numbers = config.microbatches * slices_of(config)
        self._planned: dict[Way, Codec] = {}
        """The codecs that the coordinator planned for the epoch."""

    @property
    def all(self) -> Iterable[Codec]:
        """The codecs of the run file that can pack without a placement, each once."""
        # A codec with a sample cache needs a placement to pack.
        directions = (Direction.ACTIVATION, Direction.GRADIENT)[self._caches is not None :]
        codecs = dict.fromkeys(self._codecs[direction] for direction in directions)
        return codecs | dict.fromkeys(map(codec, self._config.sync_codecs))

    @property
    def to_time(self) -> Iterable[Codec]:
        """The codecs whose speed tells the node's cost of packing, if codecs are planned."""
        pipeline = self._config.pipeline
        return map(codec, to_time(pipeline.min_bits)) if pipeline.plans_codecs else ()

    def forget(self) -> None:
        """Drop the planned codecs, because their placement is over."""
        self._planned = {}

    def plan(self, activations: tuple[str, ...], gradients: tuple[str, ...], stages: int) -> None:
        """Use these codecs, one per boundary. Empty: use the run file's.

        Raises ProtocolViolationError for unknown codecs, or if they do not fit the placement.
        """
        expected = boundaries(self._config, stages) if self._config.pipeline.plans_codecs else 0
        if (len(activations), len(gradients)) != (expected, expected):
            raise ProtocolViolationError(
                f"the coordinator plans {len(activations)} codecs of activations and {len(gradients)} of "
                f"gradients; expected {expected} of each"
            )
        rungs = ladder(self._config.pipeline.min_bits) if expected else ()
        planned: dict[Way, Codec] = {}
        for direction, names, allowed in (
            (Direction.ACTIVATION, activations, rungs),
            (Direction.GRADIENT, gradients, tuple(map(of_gradients, rungs))),
        ):
            for boundary, name in enumerate(names):
                if name not in allowed:
                    raise ProtocolViolationError(
                        f"the coordinator plans codec {name} for boundary {boundary}, but this run's file "
                        f"allows only {', '.join(allowed)}"
                    )
                planned[boundary, direction] = codec(name)
        self._planned = planned

    def name(self, direction: Direction, stage: int, stages: int, *, step: int, uncompressed: bool) -> str:
        """The codec in use for the tensors of this kind that a stage sends in a step."""
        if uncompressed:
            return self._raw.name
        if direction in (Direction.SYNC_SHARE, Direction.SYNC_SUM):
            return self._config.sync_codec_of(step)
        sent = {
            planned.name
            for (boundary, kind), planned in self._planned.items()
            if kind is direction and source_stage(TensorKey(0, 0, 0, boundary, direction), stages) == stage
        }
        if len(sent) > 1:
            # A flow counts all tensors of a direction together.
            return PLANNED
        return sent.pop() if sent else self._codecs[direction].name

    def of(self, key: TensorKey, *, uncompressed: bool) -> Codec:
        """A tensor's codec. `uncompressed`: the epoch uses fp32 on every link."""
        if uncompressed:
            return self._raw
        if key.microbatch >= self._numbers and key.direction is Direction.ACTIVATION:
            # For held-out samples, every other pass leaves out the run's codecs.
            return self._raw if (key.microbatch // self._numbers - 1) % 2 else self._trained(key)
        if self._caches is not None and key.direction is Direction.ACTIVATION:
            return self._caches.codec(key)
        return self._trained(key)

    def _trained(self, key: TensorKey) -> Codec:
        """The run's codec of a tensor, without an epoch's or a pass's replacement."""
        known = self._planned.get((key.boundary, key.direction), self._codecs[key.direction])
        return known.salted(_salt(self._config.run.seed, key)) if known.draws else known


class StageStorage:
    """How a stage stores its activations: as in the run file, or as chosen from `storage.allow`. It belongs
    to one stage at a time."""

    def __init__(self, config: RunConfig) -> None:
        self._whole = config
        self.number: int | None = None
        """The index in `allowed_storages`; None: as in the run file."""

    @property
    def config(self) -> RunConfig:
        """The run file with the stage's storage."""
        if self.number is None:
            return self._whole
        return chosen_config(self._whole, allowed_storages(self._whole)[self.number])

    def choose(self, names: tuple[str, ...], stage: int, stages: int) -> bool:
        """Use the coordinator's choice, one per stage. Returns whether it differs from the previous one.

        Raises ProtocolViolationError if the run file does not allow it.
        """
        if len(names) != (stages if self._whole.storage.allow else 0):
            raise ProtocolViolationError(
                f"the coordinator chooses {len(names)} storages for {stages} stages, where this run's file "
                f"has storage.allow = {list(self._whole.storage.allow)}"
            )
        before, self.number = self.number, None
        if names:
            allowed = [name_of(storage) for storage in allowed_storages(self._whole)]
            if names[stage] not in allowed:
                raise ProtocolViolationError(
                    f"the coordinator chooses storage {names[stage]!r}, which this run's file does not allow"
                )
            self.number = allowed.index(names[stage])
        return self.number != before


def _salt(seed: int, key: TensorKey) -> int:
    """32 bits that seed a tensor's random draws. A step that runs again in another epoch draws the same."""
    salt = mixed(seed & 0xFFFFFFFF)
    for number in (key.step, key.microbatch, key.boundary, key.direction.value):
        salt = mixed(salt ^ number)
    return salt
