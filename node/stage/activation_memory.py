"""What one stage remembers of the activations at its boundaries, for a forward codec that packs changes.

A boundary is named by the layer unit before it. The sending stage puts what it remembers into that unit's
snapshot, and after a restore both ends read it there, so that a step that is run again packs the same bytes.
A boundary that the snapshot does not know, because the model was split elsewhere, starts afresh.
"""

from collections.abc import Mapping

from torch import Tensor

from node.config.schema import RunConfig
from node.pipeline.placement import check_cache
from node.training.order import SampleOrder
from node.training.serialization import CACHE_PREFIX
from wire.codecs.aqsgd import AqsgdCodec, AqsgdTensorCodec, SampleBatch
from wire.codecs.registry import codec
from wire.codecs.sample_cache import SampleCache
from wire.errors import RunError
from wire.spec import TensorKey


class ActivationMemory:
    """The caches of one stage, by global boundary."""

    def __init__(self, config: RunConfig, windows: int) -> None:
        """
        Args:
            windows: samples of one pass over the text.

        Raises:
            ConfigError: a stage would remember more than the run file allows.
            RunError: no samples, so the coordinator and this node do not speak of the same run.
        """
        if windows < 1:
            raise RunError(
                f"codec {config.pipeline.forward_codec} needs the number of samples in the text, which the "
                "coordinator did not say: install the same thinwire on both"
            )
        check_cache(config, windows)
        found = codec(config.pipeline.forward_codec)
        assert isinstance(found, AqsgdCodec), "the only codec with a memory"
        training = config.training
        self._codec = found
        self._microbatch = training.microbatch
        self._shape = (config.model.sequence, config.model.hidden)
        self._order = SampleOrder(windows=windows, global_batch=training.global_batch, seed=config.run.seed)
        self._caches: dict[int, SampleCache] = {}

    def restore(self, step: int, states: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Remember what a snapshot of `step` holds.

        Args:
            states: by boundary, a unit's whole state; one without remembered activations starts afresh.
        """
        self._caches = {
            boundary: SampleCache(self._order.windows, self._shape, since=step) for boundary in states
        }
        for boundary, state in states.items():
            if kept := _kept(state):
                self._caches[boundary].load(kept)

    def state(self, boundary: int) -> dict[str, Tensor]:
        """A copy of what is remembered at a boundary, to go into the snapshot of the unit before it."""
        kept = self._caches[boundary].state()
        return {f"{CACHE_PREFIX}{name}": tensor for name, tensor in kept.items()}

    def codec(self, key: TensorKey) -> AqsgdTensorCodec:
        """The codec of one activation. Its size follows from `key` alone; packing needs the caches."""
        cache = self._caches[key.boundary]
        rows = slice(key.microbatch * self._microbatch, (key.microbatch + 1) * self._microbatch)
        return self._codec.of(
            SampleBatch(
                cache=cache,
                samples=self._order.samples(key.step)[rows],
                known=self._order.known(key.step, cache.since)[rows],
                place=key.microbatch,
            )
        )

    def commit(self) -> None:
        """The step is done: remember what it sent."""
        for cache in self._caches.values():
            cache.commit()

    def rollback(self) -> None:
        """The step begins, perhaps again: forget what an attempt sent that came to nothing."""
        for cache in self._caches.values():
            cache.rollback()


def _kept(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.removeprefix(CACHE_PREFIX): tensor
        for name, tensor in state.items()
        if name.startswith(CACHE_PREFIX)
    }
