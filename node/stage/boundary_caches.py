"""The sample caches of one stage's boundaries, for a forward codec that sends changes (`aqsgd-b`).

A boundary is named by the layer unit before it. The sending stage stores its cache in that unit's snapshot,
and after a restore both ends read it from there, so a repeated step packs the same bytes. A boundary that is
not in the snapshot, because the model was split elsewhere, starts with an empty cache.
"""

from collections.abc import Mapping

from torch import Tensor

from node.config.schema import RunConfig
from node.data.order import SampleOrder
from node.schedule.placement import check_cache
from node.state.serialization import CACHE_PREFIX
from wire.codecs.aqsgd import AqsgdCodec, AqsgdTensorCodec, SampleBatch
from wire.codecs.registry import codec
from wire.codecs.sample_cache import SampleCache
from wire.errors import RunError
from wire.spec import TensorKey


class BoundaryCaches:
    """The sample caches of one stage, by global boundary."""

    def __init__(self, config: RunConfig, windows: int) -> None:
        """
        Args:
            windows: samples of one pass over the text.

        Raises:
            ConfigError: the caches would be larger than the run file allows.
            RunError: the coordinator sent no number of samples.
        """
        if windows < 1:
            raise RunError(
                f"codec {config.pipeline.forward_codec} needs the number of samples in the text, which the "
                "coordinator did not send: install the same version of thinwire on both"
            )
        check_cache(config, windows)
        caching = codec(config.pipeline.forward_codec)
        assert isinstance(caching, AqsgdCodec), "the only codec with a sample cache"
        training = config.training
        self._codec = caching
        self._microbatch = training.microbatch
        self._shape = (config.model.sequence, config.model.hidden)
        self._order = SampleOrder(windows=windows, global_batch=training.global_batch, seed=config.run.seed)
        self._caches: dict[int, SampleCache] = {}

    def restore(self, step: int, states: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Load the caches from a snapshot of `step`.

        Args:
            states: a unit's whole state by boundary. Without a cache in it, the boundary starts empty.
        """
        self._caches = {
            boundary: SampleCache(self._order.windows, self._shape, since=step) for boundary in states
        }
        for boundary, state in states.items():
            if kept := _kept(state):
                self._caches[boundary].load(kept)

    def state(self, boundary: int) -> dict[str, Tensor]:
        """A copy of a boundary's cache, for the snapshot of the unit before it."""
        kept = self._caches[boundary].state()
        return {f"{CACHE_PREFIX}{name}": tensor for name, tensor in kept.items()}

    def codec(self, key: TensorKey) -> AqsgdTensorCodec:
        """The codec of one activation. Its packed size depends on `key` only; packing uses the caches."""
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
        """The step is committed: keep the samples that it sent."""
        for cache in self._caches.values():
            cache.commit()

    def rollback(self) -> None:
        """A step begins: drop the samples that an aborted attempt sent."""
        for cache in self._caches.values():
            cache.rollback()


def _kept(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.removeprefix(CACHE_PREFIX): tensor
        for name, tensor in state.items()
        if name.startswith(CACHE_PREFIX)
    }
