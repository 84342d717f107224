from dataclasses import replace
from itertools import pairwise
from math import log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.config.schema import LoraSection, ModelSection, PipelineSection, RunConfig, TrainingSection
from node.model.lora_shapes import trained_specs
from node.model.units import unit_names
from node.schedule.gradient_groups import (
    LEAST_PIECE,
    ROOT,
    Fold,
    GroupTree,
    RowShare,
    group_of,
    microbatches_of,
    model_pieces,
    owners,
    piece_bytes,
    sync_bytes,
)
from wire.messages import PlacedRow, PlacedStage, Placement

CONFIG = RunConfig(
    model=ModelSection(layers=3, hidden=256, heads=4, kv_heads=4, ffn=512, vocab=1024),
    training=TrainingSection(global_batch=16, microbatch=2),
    pipeline=PipelineSection(stages=2, groups=4),
)

counts = st.integers(1, 40)


@st.composite
def rows_of_groups(draw: st.DrawFn) -> list[list[int]]:
    """Contiguous runs of groups, in any order of rows."""
    groups = draw(st.integers(1, 24))
    cuts = sorted(draw(st.sets(st.integers(1, groups - 1))) if groups > 1 else set())
    bounds = [0, *cuts, groups]
    runs = [list(range(first, end)) for first, end in pairwise(bounds)]
    return draw(st.permutations(runs))


@given(rows_of_groups())
def test_subtrees_of_a_run_are_counted(rows: list[list[int]]) -> None:
    tree = GroupTree(sum(map(len, rows)))
    for run in rows:
        assert tree.subtree_count(run[0], run[-1] + 1) == len(tree.subtrees(run))


def told(left: str, right: str) -> str:
    return f"({left} {right})"


def test_the_tree_halves_and_the_left_half_is_longer() -> None:
    tree = GroupTree(5)

    assert [list(tree.span(node)) for node in (1, 2, 3, 4, 8, 9)] == [
        [0, 1, 2, 3, 4],
        [0, 1, 2],
        [3, 4],
        [0, 1],
        [0],
        [1],
    ]
    assert [tree.leaf(group) for group in range(5)] == [8, 9, 5, 6, 7]


@given(counts)
def test_groups_in_order_leave_few_sums(groups: int) -> None:
    tree, most = GroupTree(groups), 0
    fold = Fold[str](told)

    for group in range(groups):
        fold.put(tree.leaf(group), str(group))
        most = max(most, len(fold.nodes))

    assert list(fold.nodes) == [ROOT]
    assert most <= log2(groups) + 1


@given(rows_of_groups(), st.randoms(use_true_random=False))
def test_the_sum_is_the_same_for_any_rows_and_any_order(rows: list[list[int]], chance: object) -> None:
    groups = sum(map(len, rows))
    tree = GroupTree(groups)
    alone = Fold[str](told)
    for group in range(groups):
        alone.put(tree.leaf(group), str(group))

    sent: list[tuple[int, str]] = []
    for run in rows:
        own = Fold[str](told)
        for group in run:
            own.put(tree.leaf(group), str(group))
        assert sorted(own.nodes) == sorted(tree.subtrees(run))
        sent += own.nodes.items()
    chance.shuffle(sent)  # type: ignore[attr-defined]  # random.Random
    whole = Fold[str](told)
    for node, value in sent:
        whole.put(node, value)

    assert whole.nodes == alone.nodes


@given(rows_of_groups())
def test_every_node_that_is_sent_names_its_row(rows: list[list[int]]) -> None:
    groups = sum(map(len, rows))
    config = replace(
        CONFIG,
        training=TrainingSection(global_batch=2 * groups, microbatch=1),
        pipeline=PipelineSection(groups=groups),
    )

    shares = [RowShare(config, row, rows) for row in range(len(rows))]

    for row, nodes in enumerate(shares[0].subtrees):
        assert {shares[0].whole.sources[node] for node in nodes} == {row}
    assert sorted(m for share in shares for m in share.microbatches) == list(range(2 * groups))
    assert 2**20 not in shares[0].whole.sources


def test_an_owner_changes_only_if_it_has_no_node() -> None:
    share = RowShare(CONFIG, 0, [(0,), (1,), (2,), (3,)])
    absent: set[int] = set()
    owner = {piece: share.whole.owner(piece % 4, piece) for piece in range(24)}
    assert owner == {piece: piece % 4 for piece in range(24)}
    for lost in (2, 0):
        absent.add(lost)
        work = share.work([(1, (1, 0)), (3, (3, 2))], absent)
        now = {piece: work.owner(piece % 4, piece) for piece in range(24)}
        assert all(now[piece] == row for piece, row in owner.items() if row != lost)
        assert {now[piece] for piece, row in owner.items() if row == lost} == {0, 1, 3} - absent
        owner = now
    came = share.work([(1, (0, 1, 2, 3))], absent - {2}, [2])
    assert {came.owner(piece % 4, piece) for piece in range(24)} == {1, 3}, "who comes late owns nothing"
    assert came.others == (1, 2, 3)
    assert share.work([(2, (0, 1, 2, 3))], [1, 3], [2, 0]).owner(3, 7) == 2, "unless nobody else is there"


@pytest.mark.parametrize("late", [[1], [1, 2], [2, 1]])
def test_rows_agree_on_the_owner_if_only_nodes_are_left_that_came_late(late: list[int]) -> None:
    """Each would otherwise wait for a sum of another."""
    absent = {0, 1, 2}.difference(late)
    shares = [RowShare(CONFIG, row, [(0,), (1,), (2, 3)]) for row in late]
    works = [share.work([(late[0], (0, 1, 2, 3))], absent, late) for share in shares]
    for work in works:
        assert {work.owner(first, piece) for first in range(3) for piece in range(6)} == {late[0]}
    heirs = [{work.heir(row, first, 0) for first in range(3)} for row, work in zip(late, works, strict=True)]
    assert heirs == [{row} for row in reversed(late)]


def test_work_has_each_group_once() -> None:
    share = RowShare(CONFIG, 0, [(0, 1), (2, 3)])
    taken = share.work([(0, (0, 1)), (0, (2, 3))], [1])
    assert (taken.groups, taken.others) == ((0, 1, 2, 3), ())
    assert taken.sources == {2: 0, 3: 0}, "what a row takes over is sent by itself"
    waits = share.work([(0, (0, 1)), (2, (2, 3))], [])
    assert waits.groups == (0, 1) and waits.sources[3] == 2, "of nobody"
    for portions in ([(0, (0, 1))], [(0, (0, 1, 2)), (1, (2, 3))], [(0, (0, 1)), (3, (2, 3))]):
        with pytest.raises(ValueError, match="each group"):
            share.work(portions, [])


def test_microbatches_of_groups() -> None:
    assert [group_of(CONFIG, microbatch) for microbatch in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert microbatches_of(CONFIG, (1, 2)) == range(2, 6)


@pytest.mark.parametrize("rows", [[[0, 1], [3]], [[0, 2], [1, 3]], [[0, 1, 2, 3], []], [[0, 1], [1, 2, 3]]])
def test_rows_that_do_not_share_the_groups_are_refused(rows: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="contiguous run"):
        RowShare(CONFIG, 0, rows)


def test_a_placement_without_rows_has_all_groups() -> None:
    stages = (PlacedStage(node_id="a", address="a:1"),)

    alone = RowShare.of(CONFIG, Placement(epoch=1, stage=0, stages=stages))
    second = RowShare.of(
        CONFIG,
        Placement(
            epoch=1,
            stage=0,
            stages=stages,
            replica=1,
            rows=(PlacedRow(node=stages[0], groups=(0,)), PlacedRow(node=stages[0], groups=(1, 2, 3))),
        ),
    )

    assert (alone.rows, alone.groups) == (1, (0, 1, 2, 3))
    assert (second.rows, second.groups, second.microbatches) == (2, (1, 2, 3), range(2, 8))


@pytest.mark.parametrize("lora", [LoraSection(), LoraSection(rank=4)])
def test_pieces_cover_every_parameter_once(lora: LoraSection) -> None:
    config = replace(CONFIG, lora=lora)

    pieces = model_pieces(config)

    numbers = [piece.number for unit in unit_names(config.model) for piece in pieces[unit]]
    assert numbers == list(range(len(numbers)))
    for unit in unit_names(config.model):
        parts = [part for piece in pieces[unit] for part in piece.parts]
        for spec in trained_specs(config.model, lora, unit):
            own = sorted((first, end) for name, first, end in parts if name == spec.name)
            assert [first for first, _ in own] == [0, *(end for _, end in own[:-1])]
            assert own[-1][1] == spec.elements
        assert all(piece.elements <= LEAST_PIECE for piece in pieces[unit] if not piece.is_vectors)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.integers(1, 8))
def test_owners_have_equal_shares(sizes: list[int], rows: int) -> None:
    found = owners(dict(enumerate(sizes)), [1] * rows)

    shares = [sum(size for number, size in enumerate(sizes) if found[number] == row) for row in range(rows)]
    assert found.keys() == set(range(len(sizes)))
    assert max(shares) - min(shares) <= max(sizes)


@pytest.mark.parametrize(
    "rows",
    [
        [[0, 1, 2, 3]],
        [[0, 1], [2, 3]],
        [[0, 1, 2], [3]],
        [[0], [1, 2, 3]],
        [[0, 1], [2], [3]],
        [[0], [2, 3], [1]],
        [[2], [0, 1], [3]],
        [[0], [1], [2], [3]],
    ],
    ids=str,
)
def test_a_node_sends_little_more_than_reduce_scatter_and_all_gather(rows: list[list[int]]) -> None:
    units = unit_names(CONFIG.model)
    coded = sum(piece_bytes(piece) for unit in units for piece in model_pieces(CONFIG)[unit])

    for row in range(len(rows)):
        share = RowShare(CONFIG, row, rows)
        sent = sync_bytes(CONFIG, units, share)
        assert sent <= 1.01 * 2 * (len(rows) - 1) / len(rows) * coded
