"""What packing takes on processors, lest a codec be proposed whose packing would eat what it saves. Pure."""

from collections.abc import Mapping

from wire.identity.enrolment import CPU

PROCESSOR_NANOSECONDS: Mapping[str, tuple[float, float]] = {
    "fp32": (1.7, 1.7),
    "bf16": (0.8, 1.1),
    "fp16": (6.1, 6.9),
    "fixed": (4.2, 2.0),
    "tah": (6.3, 2.2),
    "trellis": (71.3, 18.7),
}
"""To encode and to decode an element on one core, by the codec's name without its number: as measured, and of
several measurements the slowest (scripts/results/codec_speed.json, rivals.json)."""


def nanoseconds(codec: str) -> tuple[float, float]:
    """Of an element, encoded and decoded. A codec that is not known takes what `fixed` does."""
    family = codec.partition("-")[0]
    return PROCESSOR_NANOSECONDS.get(family, PROCESSOR_NANOSECONDS["fixed"])


def packing_seconds(
    stages: int, chunks: int, elements: Mapping[str, float], costs: Mapping[str, tuple[float, float]]
) -> tuple[float, ...]:
    """What packing takes a microbatch at each of so many stages, on one core.

    Args:
        chunks: model chunks a stage; a tensor crosses between any two that follow each other.
        elements: of a tensor between two chunks, by its direction: `activation` or `gradient`.
        costs: nanoseconds an element, to encode and to decode, by direction.
    """
    seconds = [0.0] * stages
    for direction, (encode, decode) in costs.items():
        forward = direction == "activation"
        for stage in range(stages):
            # The last chunk has no activation to send, the first none to receive; gradients the other way.
            as_last, as_first = chunks - (stage == stages - 1), chunks - (stage == 0)
            sent, received = (as_last, as_first) if forward else (as_first, as_last)
            seconds[stage] += 1e-9 * elements.get(direction, 0.0) * (sent * encode + received * decode)
    return tuple(seconds)


def is_processor(device: str) -> bool:
    """Whether a node's device, as it told it, packs at a processor's speed."""
    return device == CPU
