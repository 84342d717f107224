"""`wire.link_state`: what a link counts of the frames that it sends."""

import numpy as np
import pytest

from wire.figures import FlowFigures, LinkFigures
from wire.frames import HEADER_BYTES, MOST_FRAME_BYTES, MOST_PIECES, PAYLOAD_BYTES, Frame, pack_frame
from wire.link_state import LinkSettings, LinkState
from wire.spec import Direction, TensorKey

TOTAL = PAYLOAD_BYTES + 100
"""Of a tensor of two frames."""
KEY = TensorKey(1, 0, 0, 0, Direction.GRADIENT)


def frame(number: int, key: TensorKey = KEY) -> bytes:
    """The first or the second of the tensor's frames."""
    offset = number * PAYLOAD_BYTES
    payload = np.zeros(min(PAYLOAD_BYTES, TOTAL - offset), dtype=np.uint8)
    return pack_frame(
        Frame(session=1, sequence=number, key=key, total=TOTAL, offset=offset, payload=payload.data), tag=0
    )


def created(settings: LinkSettings) -> LinkState:
    return LinkState.create(
        run_id="run",
        epoch=1,
        stage=0,
        peer_stage=1,
        settings=settings,
        expect=lambda key: None,
        on_tensor=lambda key, buffer: None,
    )


def test_bytes_and_elements_of_a_direction_grow_by_whole_tensors() -> None:
    """A report between two frames of a tensor must not show bits an element that no codec has."""
    state = created(LinkSettings())
    state.elements.append(7)
    state.frame_sent(frame(0), again=False)
    assert state.figures == LinkFigures(bytes=HEADER_BYTES + PAYLOAD_BYTES)
    state.frame_sent(frame(0), again=True)
    state.frame_sent(frame(1), again=False)
    whole = TOTAL + 2 * HEADER_BYTES
    size = whole + HEADER_BYTES + PAYLOAD_BYTES
    assert state.figures.flows == (FlowFigures(direction=KEY.direction, codec="", bytes=size, elements=7),)
    assert state.frames_sent == 3 and not state.elements


def test_activations_of_held_out_samples_are_counted_apart() -> None:
    state = created(LinkSettings(held_out_from=KEY.microbatch))
    state.elements.append(7)
    for number in (0, 1):
        state.frame_sent(frame(number, KEY._replace(direction=Direction.ACTIVATION)), again=False)
    size = TOTAL + 2 * HEADER_BYTES
    assert state.figures.flows == (
        FlowFigures(direction=Direction.HELD_OUT, codec="", bytes=size, elements=7),
    )
    assert state.figures.held_out_bytes == size


@pytest.mark.parametrize(
    ("window_pieces", "pieces"), [(1, 1), (8, 2), (64, MOST_PIECES), (4096, MOST_PIECES)]
)
def test_a_frame_of_a_fast_line_takes_a_quarter_of_the_window_at_most(
    window_pieces: int, pieces: int
) -> None:
    state = created(LinkSettings(window_bytes=window_pieces * PAYLOAD_BYTES))
    state.meter.queued(10**10, 0.0)
    state.meter.acknowledged(10**10, round_trip=0.0, now=1.0)
    state.sender.send(KEY, bytes(2 * MOST_FRAME_BYTES))
    state.sender.acknowledge(0, credit_limit=window_pieces)
    data = state.next_frame(0.0)
    assert data is not None and len(data) == HEADER_BYTES + pieces * PAYLOAD_BYTES
