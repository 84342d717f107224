"""The state of a stage that may be in host memory: what each kind frees, takes there and costs. This module
imports no torch.

As in LLMQ (arXiv 2512.15306, sections 3.1 and A.1) the optimizer's moments leave first, because only its step
reads them (`node.training.host_moments`). Next are the weights of blocks, which every pass fetches, and their
main gradients, which backward fetches and sends back (`node.model.streamed`): of as many blocks as necessary,
whichever takes less time. With adapters these are frozen weights, which passes fetch and which are never sent
back. If products are in FP8 and the weights' codes move, passes fetch the codes, and the step fetches the
master weights. Embedding and head stay on the device, because they are as large as several blocks.
"""

from collections.abc import Sequence
from typing import NamedTuple

from node.config.schema import RunConfig
from node.model.units import is_block
from node.tuning.block_times import BlockTimes
from node.tuning.device_memory import Devices, Share
from node.tuning.memory_columns import StateMove

_THERE = 2
"""The number of blocks whose weights or gradients are on the device (`node.model.streamed.AT_ONCE`)."""
_LEAVING = 1
"""The number of blocks whose changes are on their way to host memory."""


class Moved(NamedTuple):
    """The state of a stage that is in host memory."""

    moments: int = 0
    """1 if the moments of all matrices are in host memory, else 0."""
    weights: int = 0
    """The number of blocks whose matrices are in host memory."""
    gradients: int = 0
    """The number of these blocks whose main gradients are there too."""
    codes: int = 0
    """The number of blocks whose codes for products in FP8 are in host memory."""


STAYS = Moved()


def moved_blocks(blocks: Sequence[str], count: int) -> tuple[str, ...]:
    """The blocks of a stage that move if `count` do. They are spread evenly, so that a copy can hide behind
    the compute of several blocks."""
    return tuple(blocks[(2 * number + 1) * len(blocks) // (2 * count)] for number in range(count))


def state_moves(
    config: RunConfig, devices: Devices, share: Share, units: Sequence[str], times: BlockTimes
) -> tuple[StateMove, ...]:
    """The kinds of state of a stage that may move, in the order of `Moved`; empty without host memory.

    Weights and gradients may move if a device computes a stage alone and operation by operation. Adapters and
    their gradients are small and stay. If autocast holds copies of all weights during a forward
    (`Share.holds_copies`), moving weights would free little, so they stay too.
    """
    if devices.on_cpu or devices.host_bytes == 0:
        return ()
    rate = min(times.out_rate, times.in_rate) * config.microbatches
    moments = share.moments(units)
    moves = [
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
        return tuple(moves)
    weights = share.block_weights(blocks[0])
    if config.lora.rank:
        moves.append(
            StateMove(
                most=len(blocks),
                freed=weights,
                there=_THERE * weights,
                host=share.in_host_pieces(weights, blocks[0]),
                seconds=0.0,
                forward_in=weights,
                backward_in=weights,
            )
        )
        return tuple(moves)
    gradients = share.block_gradients(blocks[0])
    # Passes whose products are in FP8 read codes, which each step computes anew. Only that reads the weights.
    codes = share.block_codes(blocks[0])
    in_passes = 0 if codes else weights
    moves.append(
        StateMove(
            most=len(blocks),
            freed=weights,
            there=_THERE * in_passes,
            applying=(_THERE + _LEAVING) * weights - _THERE * in_passes,
            host=share.in_host_pieces(weights, blocks[0]),
            # The engines copy in both directions at once. Weights are fetched once more to be coded.
            seconds=(2 * weights if codes else weights) / rate,
            forward_in=in_passes,
            backward_in=in_passes,
        )
    )
    # The first microbatch of a step starts from 0 and fetches no gradients.
    gradients_in = gradients * (config.microbatches - 1) // config.microbatches
    moves.append(
        StateMove(
            most=len(blocks),
            freed=gradients,
            there=(_THERE + _LEAVING) * gradients,
            host=share.in_host_pieces(gradients, blocks[0]),
            # Fetched for the norms, and again for the step.
            seconds=2 * gradients / rate,
            backward_in=gradients_in,
            backward_out=gradients,
        )
    )
    if codes:
        moves.append(
            StateMove(
                most=len(blocks),
                freed=codes,
                there=_THERE * codes,
                applying=_LEAVING * codes,
                host=share.in_host_pieces(codes, blocks[0]),
                seconds=codes / rate,
                forward_in=codes,
                backward_in=codes,
            )
        )
    return tuple(moves)
