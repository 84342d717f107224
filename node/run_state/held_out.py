"""Measurements of the held-out loss: their passes, and when one is due. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from node.config.schema import RunConfig
from wire.codecs.formats import FP32

LOSSLESS = FP32.name


@dataclass(frozen=True, kw_only=True)
class HeldOutPass:
    """A pass over held-out samples. The run file and the text determine the passes of a run."""

    number: int
    """The values of `wire.messages.Validate`."""
    microbatches: int


def held_out_passes(config: RunConfig, samples: int) -> tuple[HeldOutPass, ...]:
    """The passes over this many held-out samples: each batch with the run's codec, then with fp32.

    One pass is enough if the codec is fp32, and for a codec with a sample cache, which only packs changes of
    training samples.
    """
    pipeline, training = config.pipeline, config.training
    both = pipeline.forward_codec != LOSSLESS and not pipeline.remembers
    passes = []
    for batch, first in enumerate(range(0, samples, training.global_batch)):
        count = min(training.global_batch, samples - first) // training.microbatch
        if count:
            numbers = (2 * batch, 2 * batch + 1) if both else (2 * batch + 1,)
            passes += [HeldOutPass(number=number, microbatches=count) for number in numbers]
    return tuple(passes)


class HeldOutSchedule:
    """Decides at which steps the held-out loss is measured, and remembers the least loss."""

    def __init__(self, measured: Sequence[int] | frozenset[int], best: float) -> None:
        self._measured = set(measured)
        self._best = best

    def due(self, step: int, every: int, last: int, *, also: bool = False) -> bool:
        """Whether to measure the state of `step`: every `every` steps, at the last step, and if `also` is
        set."""
        if every < 1 or step < 1 or step in self._measured:
            return False
        return also or step % every == 0 or step >= last

    def record(self, step: int, uncompressed: float) -> bool:
        """The loss of a step was measured. Returns whether it is the least so far."""
        self._measured.add(step)
        is_best = uncompressed < self._best  # False for NaN
        if is_best:
            self._best = uncompressed
        return is_best


@dataclass(frozen=True, kw_only=True)
class PassLosses:
    """The losses of all passes of one measurement, in nats per token."""

    as_trained: float | None
    """The mean with the run's codecs; None if no pass used them."""
    uncompressed: float
    microbatches: int


def pass_losses(passes: Sequence[HeldOutPass], losses: Sequence[float]) -> PassLosses:
    """The means over these passes' losses."""
    done = list(zip(passes, losses, strict=True))
    as_trained = mean_loss([(run.microbatches, loss) for run, loss in done if run.number % 2 == 0])
    exact = [(run.microbatches, loss) for run, loss in done if run.number % 2]
    uncompressed = mean_loss(exact)
    assert uncompressed is not None, "every batch has a pass with fp32"
    count = sum(count for count, _ in exact)
    return PassLosses(as_trained=as_trained, uncompressed=uncompressed, microbatches=count)


def mean_loss(parts: Sequence[tuple[int, float]]) -> float | None:
    """The weighted mean of (weight, loss); None without parts."""
    whole = sum(weight for weight, _ in parts)
    return sum(weight * loss for weight, loss in parts) / whole if parts else None
