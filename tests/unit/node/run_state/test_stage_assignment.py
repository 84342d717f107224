"""Who sits where, for how long the run waits for whom, and on how many stages it goes on."""

import itertools
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from node.config.schema import ModelSection, RunConfig, TrainingSection
from node.run_state import stage_assignment as module
from node.run_state.stage_assignment import (
    Candidate,
    StageAssigner,
    prefetch_order,
    sharing,
    stage_needs,
    useless,
)
from node.tuning.device_memory import Devices


def nodes(names: str, memory: int = 0) -> list[Candidate]:
    return [Candidate(node_id=name, memory_bytes=memory) for name in names]


def sized(**memory: int) -> list[Candidate]:
    return [Candidate(node_id=name, memory_bytes=size) for name, size in memory.items()]


def assign(
    previous: Sequence[str | None], candidates: Sequence[Candidate], needs: Sequence[int]
) -> tuple[str, ...] | None:
    """Where every node needs as much."""
    return module.assign(previous, candidates, len(needs), lambda _stages, _devices: needs)


# ---- one placement


def test_order_is_kept_when_the_number_of_stages_changes() -> None:
    assert assign(("d", "gone", "b", "a"), nodes("abd"), [1, 1, 1]) == ("d", "b", "a")
    assert assign(("d", "b", "a"), nodes("abcd"), [1, 1, 1, 1]) == ("d", "b", "a", "c")


def test_nodes_swap_stages_only_where_that_helps() -> None:
    # "large" came first and took what "small" could have had.
    assert assign((), sized(large=9, small=4), [3, 8]) == ("small", "large")
    assert assign(("large", None), sized(large=9, small=4), [3, 8]) == ("small", "large")
    # A holder whose stage has grown moves; the chain is three long.
    assert assign(("c", "b", None), sized(a=1, b=2, c=3), [1, 2, 3]) == ("a", "b", "c")


@given(
    st.lists(st.integers(0, 6), max_size=6),
    st.lists(st.integers(1, 6), min_size=1, max_size=5),
    st.lists(st.none() | st.integers(0, 7), max_size=6),
)
def test_a_placement_is_found_whenever_there_is_one(
    rooms: list[int], needs: list[int], held: list[int | None]
) -> None:
    candidates = [Candidate(node_id=f"n{i}", memory_bytes=room) for i, room in enumerate(rooms)]
    distinct = [node if held.index(node) == at else None for at, node in enumerate(held)]
    previous = [None if node is None else f"n{node}" for node in distinct]
    found = assign(previous, candidates, needs)

    def fits(order: tuple[Candidate, ...]) -> bool:
        pairs = zip(order, needs, strict=True)
        return all(c.memory_bytes == 0 or c.memory_bytes >= need for c, need in pairs)

    possible = any(fits(order) for order in itertools.permutations(candidates, len(needs)))
    assert (found is not None) == possible
    if found is not None:
        chosen = {candidate.node_id: candidate for candidate in candidates}
        assert len(set(found)) == len(needs)
        assert fits(tuple(chosen[node] for node in found))
        present = tuple(chosen[node] for node in previous if node in chosen)
        if len(previous) == len(present) == len(needs) and fits(present):
            assert list(found) == previous


# ---- over time


def make_assigner(
    stages: int = 3, least: int = 3, previous: tuple[str, ...] = (), total: int = 12
) -> StageAssigner:
    """Stages of a model of `total` bytes, split evenly."""
    return StageAssigner(
        stages=stages,
        min_stages=least,
        regroup_seconds=10.0,
        stage_bytes=lambda count, _devices: [total // count] * count,
        previous=previous,
    )


def test_a_new_run_waits_for_all_stages_however_long() -> None:
    assigner = make_assigner(least=1)
    assert assigner.choose(nodes("ab"), 0.0) is None
    assert assigner.choose(nodes("ab"), 1000.0) is None
    assert assigner.choose(nodes("abc"), 1000.0) == ("a", "b", "c")


def test_a_node_without_a_stage_gives_up_nothing() -> None:
    assigner = make_assigner()
    assert assigner.choose(nodes("abc"), 0.0)
    assert not assigner.vacate("x", 1.0)
    assert assigner.choose(nodes("abcx"), 1.0) == ("a", "b", "c")


def test_the_same_nodes_continue_at_once_when_an_epoch_ends_otherwise() -> None:
    """An aborted step on fewer stages than asked for must not wait for ever."""
    assigner = make_assigner(least=1)
    assert assigner.choose(nodes("abc"), 0.0)
    assigner.vacate("b", 5.0)
    assert assigner.choose(nodes("ac"), 15.0) == ("a", "c")
    assert assigner.choose(nodes("ac"), 16.0) == ("a", "c")
    assigner.vacate("a", 20.0)
    assert assigner.choose(nodes("c"), 30.0) == ("c",)
    assert assigner.choose(nodes("c"), 31.0) == ("c",)
    assert assigner.choose(nodes("cab"), 32.0) == ("c", "a", "b")


def test_holders_from_before_a_restart_get_a_moment_from_the_first_that_comes() -> None:
    assigner = make_assigner(previous=("a", "b", "c"))
    assert assigner.choose([], 0.0) is None
    assert assigner.choose([], 100.0) is None
    assert assigner.choose(nodes("xyzb"), 100.0) is None
    assert assigner.choose(nodes("xyzb"), 109.9) is None
    assert assigner.choose(nodes("xyzbac"), 109.9) == ("a", "b", "c")


def test_a_resumed_run_may_ask_for_fewer_or_more_stages() -> None:
    fewer = make_assigner(stages=2, least=2, previous=("a", "b", "c", "d"))
    assert fewer.choose(nodes("abcd"), 0.0) == ("a", "b")
    more = make_assigner(stages=3, least=3, previous=("a", "b"))
    assert more.choose(nodes("ab"), 0.0) is None
    assert more.choose(nodes("abx"), 1.0) == ("a", "b", "x")


def test_a_run_can_grow_at_once_when_asked() -> None:
    assigner = make_assigner(least=1)
    assigner.choose(nodes("abc"), 0.0)
    assigner.vacate("b", 0.0)
    assert assigner.choose(nodes("ac"), 10.0) == ("a", "c")
    assigner.vacate("c", 20.0)
    assert assigner.choose(nodes("a"), 30.0) == ("a",)
    assert not assigner.can_grow(1, nodes("a"))
    assert assigner.can_grow(1, nodes("ax"))
    assert not assigner.can_grow(2, nodes("ax"))
    assert assigner.choose(nodes("ax"), 31.0) == ("a",)
    assigner.regroup(32.0)
    assert assigner.choose(nodes("ax"), 32.0) == ("a", "x")


def test_a_run_never_grows_beyond_what_it_asks_for_or_what_fits() -> None:
    assigner = make_assigner(stages=3, total=12)
    assert not assigner.can_grow(3, nodes("abcde"))
    assert not assigner.can_grow(2, sized(a=6, b=6, c=3))
    assert assigner.can_grow(2, sized(a=6, b=6, c=4))


def test_nodes_without_the_memory_are_explained_and_then_done_without() -> None:
    """Three nodes are here, one of them too small for a third: two can share the model."""
    assigner = make_assigner(stages=3, least=2, total=12 * 2**20)
    here = sized(a=9 * 2**20, b=9 * 2**20, c=2**20)
    assert assigner.shortage(here[:2]) is None
    line = assigner.shortage(here)
    assert line is not None
    assert "need 4 MiB, 4 MiB, 4 MiB" in line and "a 9 MiB, b 9 MiB, c 1 MiB" in line
    assert assigner.choose(here, 0.0) is None
    assert assigner.choose(here, 10.0) == ("a", "b")
    assert assigner.shortage(sized(a=4 * 2**20, b=0, c=9 * 2**20)) is None


def test_spares_begin_at_different_stages_and_cover_all() -> None:
    units = [("embed", "block.0"), ("block.1",), ("block.2", "head")]
    orders = [prefetch_order(spare, units) for spare in range(4)]
    assert orders[0] == ("embed", "block.0", "block.1", "block.2", "head")
    assert orders[1] == ("block.1", "block.2", "head", "embed", "block.0")
    assert orders[2] == ("block.2", "head", "embed", "block.0", "block.1")
    assert orders[3] == orders[0]


# ---- several devices a node


def test_what_a_node_must_have_follows_from_its_devices() -> None:
    pair = Devices(count=2, tensor_parallel=2)

    def need(stages: int, devices: Devices) -> list[int]:
        return [8 // devices.tensor_parallel] * stages

    small = Candidate(node_id="small", memory_bytes=4)
    shared = Candidate(node_id="shared", memory_bytes=4, devices=pair)
    large = Candidate(node_id="large", memory_bytes=8)
    assert module.assign((), [small, shared, large], 2, need) == ("shared", "large")
    assert module.assign((), [small, large], 2, need) is None


def test_a_shortage_says_what_each_kind_of_node_needs() -> None:
    assigner = StageAssigner(
        stages=2,
        min_stages=2,
        regroup_seconds=1.0,
        stage_bytes=lambda stages, devices: [(16 << 20) // devices.tensor_parallel] * stages,
    )
    pair = Devices(count=2, tensor_parallel=2)
    here = [
        Candidate(node_id="a", memory_bytes=16 << 20),
        Candidate(node_id="b", memory_bytes=4 << 20, devices=pair),
    ]
    one, two = (assigner.shortage(here) or "").split("; ")
    assert "need 16 MiB, 16 MiB" in one and one.endswith("have a 16 MiB")
    assert "need 8 MiB, 8 MiB on each of 2 devices" in two and two.endswith("have b 4 MiB")


def test_the_smallest_stage_of_any_split_decides_who_is_too_small() -> None:
    assigner = make_assigner(stages=3, least=1, total=12 << 20)
    assert assigner.useless(Candidate(node_id="a", memory_bytes=4 << 20)) is None
    assert assigner.useless(Candidate(node_id="a", memory_bytes=0)) is None
    line = assigner.useless(Candidate(node_id="a", memory_bytes=3 << 20))
    assert line is not None and "\n" not in line
    assert line.startswith("the smallest of 3 stages needs an estimated 4 MiB, and this node offers 3 MiB: ")


def test_devices_that_cannot_share_a_stage_are_refused_regardless_of_memory() -> None:
    """By the run's own sizes, and before the estimate, which holds for what is divided evenly alone."""
    config = RunConfig(
        model=ModelSection(layers=2, hidden=64, heads=4, kv_heads=2, ffn=96, vocab=64, sequence=16),
        training=TrainingSection(global_batch=8, microbatch=2),
    )

    def line(count: int, tensor_parallel: int, memory: int = 0) -> str | None:
        node = Candidate(
            node_id="a",
            memory_bytes=memory,
            devices=Devices(count=count, tensor_parallel=tensor_parallel),
        )
        return useless(node, range(1, 3), stage_needs(config, 0), sharing(config))

    assert line(1, 1) is line(2, 1) is line(2, 2) is line(4, 2) is None
    said = line(4, 4, memory=1)
    assert said is not None and said.startswith(
        "--tensor-parallel 4 does not divide this run's model.kv_heads 2: "
    )
    said = line(3, 1)
    assert said is not None and said.startswith("3 devices cannot share microbatches of 2 samples: ")
    said = line(2, 2, memory=1)
    assert said is not None and "needs an estimated" in said
