"""The floor: right on cases done by hand, never above what the event simulation reaches."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.schedule.floor import LinkRate, PipelineStep, ResourceKind, chunk_shares
from node.schedule.schedule import Kind, schedule
from node.schedule.simulation import simulate


def test_free_links_give_the_textbook_time() -> None:
    """(M + n - 1)(f + b), which 1F1B reaches (arXiv 2104.04473, section 2.2.1)."""
    floor = PipelineStep(microbatches=7, forward=[1] * 4, backward=[2] * 4).floor()
    assert floor.seconds == (7 + 3) * 3
    assert floor.microbatch_seconds == 3
    assert str(floor.binds) == "compute of stage 3"
    assert floor.share(60) == 0.5


def test_a_slow_link_by_hand() -> None:
    """Ten bytes a second up, five down, half a second of latency: the gradients' direction binds."""
    floor = PipelineStep(
        microbatches=8,
        forward=[1, 1],
        backward=[2, 2],
        activation_bytes=40,
        gradient_bytes=50,
        links=[LinkRate(up=10, down=5, latency=0.5)],
        after_seconds=0.25,
    ).floor()
    # Fill: forward 1, transfer 4.5, forward 1, backward 2. Drain: latency and stage 0's backward.
    assert floor.seconds == 8.5 + 8 * 10 + 0.5 + 2 + 0.25
    assert str(floor.binds) == "link 1 to 0"
    assert (floor.binds.stage, floor.binds.peer_stage, floor.binds.direction) == (1, 0, "down")
    assert floor.microbatch_seconds == 10


def test_an_interface_is_shared_by_both_links_of_a_middle_stage() -> None:
    """The middle stage uploads activations one way and gradients the other, through one wire."""
    floor = PipelineStep(
        microbatches=6,
        forward=[1, 1, 1],
        backward=[1, 1, 1],
        activation_bytes=20,
        gradient_bytes=30,
        interfaces=[LinkRate(up=10, down=10)] * 3,
    ).floor()
    assert floor.microbatch_seconds == 5
    assert floor.binds.kind is ResourceKind.INTERFACE
    assert str(floor.binds) in ("upload of stage 1", "download of stage 1")


def test_nothing_to_do_takes_no_time() -> None:
    assert PipelineStep(microbatches=3, forward=[0.0], backward=[0.0]).floor().seconds == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"forward": []},
        {"backward": [1]},
        {"microbatches": 0},
        {"chunks": 0},
        {"links": [LinkRate()] * 2},
        {"interfaces": [LinkRate()]},
        {"links": [LinkRate(up=0)]},
        {"links": [LinkRate(latency=-1)]},
        {"activation_bytes": -1},
    ],
)
def test_impossible_values_are_refused(wrong: dict[str, object]) -> None:
    given = {"microbatches": 2, "forward": [1, 1], "backward": [1, 1], **wrong}
    with pytest.raises(ValueError):
        PipelineStep(**given).floor()  # type: ignore[arg-type]


@given(
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 12),
    st.integers(0, 4),
    st.lists(st.floats(0.01, 10), min_size=10, max_size=10),
    st.floats(0, 20),
    st.floats(0, 20),
    st.floats(0, 5),
    st.none() | st.floats(0, 1),
)
def test_no_simulated_schedule_beats_the_floor(
    stages: int,
    chunks: int,
    microbatches: int,
    window: int,
    times: list[float],
    activation: float,
    gradient: float,
    latency: float,
    head_share: float | None,
) -> None:
    forward, backward = times[:stages], times[5 : 5 + stages]
    head_share = None if stages == 1 else head_share
    shares = chunk_shares(stages, chunks, head_share)
    timeline = simulate(
        schedule(stages, chunks, microbatches, window, head_first=head_share is not None),
        lambda chunk, _: forward[chunk % stages] * shares[chunk],
        lambda chunk, _: backward[chunk % stages] * shares[chunk],
        lambda tensor: activation if tensor.kind is Kind.FORWARD else gradient,
        latency,
    )
    joints = max(0, stages - 1) + ((chunks > 1 or head_share is not None) and stages > 2)
    floor = PipelineStep(
        microbatches=microbatches,
        forward=forward,
        backward=backward,
        activation_bytes=activation,
        gradient_bytes=gradient,
        links=[LinkRate(up=1, down=1, latency=latency)] * joints,
        chunks=chunks,
        head_share=head_share,
    ).floor()
    assert floor.seconds <= timeline.total * (1 + 1e-9)
