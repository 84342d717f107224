"""State of a stage that may be in host memory: what each kind frees, takes there and costs. Torch-free.

As in LLMQ (papers/llmq.txt, sections 3.1 and A.1) the optimizer's moments leave first, which only its step
reads (`node.training.host_moments`). Then the weights of blocks, which every pass fetches, and their main
gradients, which backward fetches and sends back (`node.model.streamed`): of as many blocks as need to,
whichever takes less time. With adapters they are frozen weights, which come for passes alone and never go
back. Where products are in FP8, passes fetch the weights' codes, if these move, and the
masters come for the step alone. Embedding and head keep theirs: they are as large as several blocks.
"""

from collections.abc import Sequence
from typing import NamedTuple

from node.config.schema import RunConfig
from node.model.units import is_block
from node.tuning.block_times import BlockTimes
from node.tuning.device_memory import Devices, Share
from node.tuning.memory_program import StateMove

_THERE = 2
"""Blocks whose weights or gradients are on the device (`node.model.streamed.AT_ONCE`)."""
_LEAVING = 1
"""Blocks whose changes are on their way to host memory."""


class Moved(NamedTuple):
    """State of a stage that is in host memory."""

    moments: int = 0
    """1 if the moments of all matrices are in host memory."""
    weights: int = 0
    """How many blocks have their matrices there."""
    gradients: int = 0
    """How many of these have their main gradients there."""
    codes: int = 0
    """How many blocks have their codes for products in FP8 there."""


STAYS = Moved()


def moved_blocks(blocks: Sequence[str], count: int) -> tuple[str, ...]:
    """Which of a stage's blocks move, if so many do: spread evenly, so that copies of one have the compute of
    several to hide behind."""
    return tuple(blocks[(2 * number + 1) * len(blocks) // (2 * count)] for number in range(count))


def state_moves(
    config: RunConfig, devices: Devices, share: Share, units: Sequence[str], times: BlockTimes
) -> tuple[StateMove, ...]:
    """Of a stage with these units, in the order of `Moved`, as far as it may move; none without host memory.

    Weights and gradients move where a device computes a stage alone and operation by operation. Adapters and
    their gradients are small, and stay. Autocast holds copies of all weights in a forward
    (`Share.holds_copies`), so that moving these frees little.
    """
    if devices.on_cpu or devices.host_bytes == 0:
        return ()
    rate = min(times.out_rate, times.in_rate) * config.microbatches
    moments = share.moments(units)
    found = [
        StateMove(
            most=1,
            freed=moments,
            applying=share.applying_streamed(units) - share.applying(units),
            host=share.moments_on_host(units),
            seconds=moments / rate,
        )
    ]
    blocks = [unit for unit in units if is_block(unit)]
    alone = devices.count == 1 and not share.captures
    if not alone or share.holds_copies or not blocks:
        return tuple(found)
    weights = share.block_weights(blocks[0])
    if config.lora.rank:
        found.append(
            StateMove(
                most=len(blocks),
                freed=weights,
                there=_THERE * weights,
                host=share.in_host_pieces(weights, blocks[0]),
                seconds=0.0,
                forward_in=weights,
                backward_in=weights,
                slowing=2 * weights * times.slowing,
            )
        )
        return tuple(found)
    gradients = share.block_gradients(blocks[0])
    # Passes whose products are in FP8 read codes, which each step makes anew; weights come for that alone.
    codes = share.block_codes(blocks[0])
    in_passes = 0 if codes else weights
    found.append(
        StateMove(
            most=len(blocks),
            freed=weights,
            there=_THERE * in_passes,
            applying=(_THERE + _LEAVING) * weights - _THERE * in_passes,
            host=share.in_host_pieces(weights, blocks[0]),
            # The engines copy both ways at a time. To code weights they come once more.
            seconds=(2 * weights if codes else weights) / rate,
            forward_in=in_passes,
            backward_in=in_passes,
            slowing=2 * in_passes * times.slowing,
        )
    )
    # The first microbatch of a step begins at 0.
    gradients_in = gradients * (config.microbatches - 1) // config.microbatches
    found.append(
        StateMove(
            most=len(blocks),
            freed=gradients,
            there=(_THERE + _LEAVING) * gradients,
            host=share.in_host_pieces(gradients, blocks[0]),
            # For the norms, and again for the step.
            seconds=2 * gradients / rate,
            backward_in=gradients_in,
            backward_out=gradients,
            slowing=(gradients_in + gradients) * times.slowing,
        )
    )
    if codes:
        found.append(
            StateMove(
                most=len(blocks),
                freed=codes,
                there=_THERE * codes,
                applying=_LEAVING * codes,
                host=share.in_host_pieces(codes, blocks[0]),
                seconds=codes / rate,
                forward_in=codes,
                backward_in=codes,
                slowing=2 * codes * times.slowing,
            )
        )
    return tuple(found)
