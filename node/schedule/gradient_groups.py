"""Gradient groups: how a step's gradient is summed, independent of who computes it. All functions are pure
and need no torch.

A step's microbatches are divided into G groups of equal length. A stage's gradient of one group is packed
with `pipeline.sync_codec`, and the sum over groups is taken in a fixed binary tree. A leaf is a group. An
inner node is the sum of its two children's unpacked values, packed again. So a step's bits depend only on G,
not on how many rows of nodes share the groups.

Matrices are packed in pieces of their own. The vectors of a layer unit are few, and one piece in float32 has
all of them. Every piece has a number in the whole model. Among R rows each piece has an owner: the other rows
send it the largest whole subtrees that they hold, and receive the code of the whole sum.

In a round (`[sync] every`) the same is done with the change of the weights in each group's local steps,
packed with `sync.codec`, and with the update rules' `round_means`. These are in float32, or, if they are
whole matrices, packed like changes.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import nlargest
from itertools import zip_longest
from typing import Generic, TypeVar

from node.config.schema import RunConfig
from node.model.families.family import ParameterSpec
from node.model.lora_shapes import trained_specs
from node.model.optimizers import UpdateRule, update_rules
from node.model.units import unit_names
from wire.codecs.formats import FP32, Format, codec_format
from wire.messages import Placement

Value = TypeVar("Value")

ROOT = 1
"""The tree's node that holds all groups. The children of node n are 2n and 2n + 1."""
PIECES = 1024
"""A model's matrices are cut into about this many pieces, so that owners have equal shares. To pack, add or
unpack a piece takes 0.2 to 0.3 ms besides the time for its elements."""
LEAST_PIECE, MOST_PIECE = 2**15, 2**21
"""The least and the most elements of a piece: enough that its overhead is small, few enough for memory. They
are powers of two, so pieces are whole blocks and tiles of any codec."""


class GroupTree:
    """The tree over groups 0 to `groups` - 1, by halves. The left half is the longer one."""

    def __init__(self, groups: int) -> None:
        self.groups = groups
        self._spans: dict[int, tuple[int, int]] = {}
        self._leaves: dict[int, int] = {}
        self._fill(ROOT, 0, groups)

    def _fill(self, node: int, first: int, end: int) -> None:
        self._spans[node] = first, end
        if end - first == 1:
            self._leaves[first] = node
            return
        middle = first + (end - first + 1) // 2
        self._fill(2 * node, first, middle)
        self._fill(2 * node + 1, middle, end)

    def leaf(self, group: int) -> int:
        return self._leaves[group]

    def span(self, node: int) -> range:
        """The groups below a node of the tree. Raises KeyError for another number."""
        return range(*self._spans[node])

    def __contains__(self, node: int) -> bool:
        return node in self._spans

    def subtree_count(self, first: int, end: int, node: int = ROOT) -> int:
        """How many `subtrees` the groups from `first` to before `end` have below a node."""
        low, high = self._spans[node]
        if end <= low or high <= first:
            return 0
        if first <= low and high <= end:
            return 1
        return sum(self.subtree_count(first, end, child) for child in (2 * node, 2 * node + 1))

    def subtrees(self, groups: Collection[int]) -> tuple[int, ...]:
        """The fewest nodes that hold exactly these groups, in the groups' order."""
        held, tops, nodes = sorted(set(groups)), list[int](), [ROOT]
        while nodes:
            node = nodes.pop()
            first, end = self._spans[node]
            count = bisect_left(held, end) - bisect_left(held, first)
            if count == end - first:
                tops.append(node)
            elif count:
                nodes += (2 * node + 1, 2 * node)
        return tuple(tops)

    def spans(self, groups: Collection[int]) -> tuple[range, ...]:
        """The groups below each of the `subtrees`."""
        return tuple(map(self.span, self.subtrees(groups)))


class Fold(Generic[Value]):
    """Sums nodes of the tree as they arrive. An inner node is computed as soon as both its children are
    known."""

    def __init__(self, add: Callable[[Value, Value], Value]) -> None:
        """`add` returns the sum of a left and a right child."""
        self._add = add
        self.nodes: dict[int, Value] = {}
        """The known nodes without a known sibling. If groups arrive in order, there are at most log2(G) +
        1."""

    def put(self, node: int, value: Value) -> None:
        while node > ROOT and (other := self.nodes.pop(node ^ 1, None)) is not None:
            value = self._add(other, value) if node % 2 else self._add(value, other)
            node //= 2
        self.nodes[node] = value


def group_of(config: RunConfig, microbatch: int) -> int:
    return microbatch * config.pipeline.groups // config.microbatches


def parts_of_group(config: RunConfig, group: int, parts: int) -> list[range]:
    """A group's microbatches, divided into equal parts."""
    whole = microbatches_of(config, [group])
    length = len(whole) // parts
    return [whole[first : first + length] for first in range(0, len(whole), length)]


def microbatches_of(config: RunConfig, groups: Sequence[int]) -> range:
    """The microbatches of contiguous groups."""
    length = config.microbatches // config.pipeline.groups
    return range(groups[0] * length, (groups[-1] + 1) * length)


# ---- pieces


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a layer unit's gradient that is packed at once: float32 [elements]."""

    number: int
    """The number of the piece in the whole model."""
    unit: str
    parts: tuple[tuple[str, int, int], ...]
    """(parameter, first element, end) of each part, in order: a part of one matrix, or all vectors."""
    is_vectors: bool
    codec: str

    @property
    def elements(self) -> int:
        return sum(end - first for _, first, end in self.parts)


@lru_cache(maxsize=8)
def model_pieces(config: RunConfig, *, of_round: bool = False) -> Mapping[str, tuple[Piece, ...]]:
    """The pieces of every layer unit, by unit in model order, for an exact step or for a round."""
    matrices = config.sync.codec if of_round else config.pipeline.sync_codec
    units = {name: trained_specs(config.model, config.lora, name) for name in unit_names(config.model)}
    largest = _piece_elements(sum(spec.elements for specs in units.values() for spec in specs))
    by_unit: dict[str, tuple[Piece, ...]] = {}
    number = 0
    for unit, specs in units.items():
        pieces = [
            Piece(number + index, unit, parts, is_vectors, FP32.name if is_vectors else matrices)
            for index, (parts, is_vectors) in enumerate(
                _parts(specs, largest, update_rules(config, unit) if of_round else ())
            )
        ]
        by_unit[unit] = tuple(pieces)
        number += len(pieces)
    return by_unit


def _piece_elements(total: int) -> int:
    size = LEAST_PIECE
    while size < MOST_PIECE and size * PIECES < total:
        size *= 2
    return size


def _parts(
    specs: Sequence[ParameterSpec], largest: int, rules: Sequence[UpdateRule]
) -> list[tuple[tuple[tuple[str, int, int], ...], bool]]:
    vectors: list[tuple[str, int, int]] = []
    parts: list[tuple[tuple[tuple[str, int, int], ...], bool]] = []
    for spec, rule in zip_longest(specs, rules):
        is_vector = len(spec.shape) < 2
        means = rule.round_means(spec.shape) if rule else {}
        vectors += [
            (f"{kind}.{spec.name}", 0, mean.elements) for kind, mean in means.items() if not mean.is_coded
        ]
        if is_vector:
            vectors.append((spec.name, 0, spec.elements))
            continue
        coded = {f"{kind}.{spec.name}": mean.elements for kind, mean in means.items() if mean.is_coded}
        for name, elements in {spec.name: spec.elements, **coded}.items():
            for first in range(0, elements, largest):
                parts.append((((name, first, min(first + largest, elements)),), False))
    return [*parts, (tuple(vectors), True)] if vectors else parts


def piece_format(piece: Piece, *, uncompressed: bool = False) -> Format:
    """The codec of a piece. It needs no torch."""
    return FP32 if uncompressed else codec_format(piece.codec)


def piece_bytes(piece: Piece, *, uncompressed: bool = False) -> int:
    """The bytes of a packed piece, including the header."""
    return piece_format(piece, uncompressed=uncompressed).packed_bytes((piece.elements,))


# ---- rows


def owners(sizes: Mapping[int, int], subtrees: Sequence[int]) -> dict[int, int]:
    """The row that sums each piece. Every row computes the same answer. It minimizes what the busiest sender
    sends, and then makes the rows' shares of bytes as equal as possible.

    Args:
        sizes: the bytes of each piece by its number.
        subtrees: the number of the tree's nodes that each row holds. It sends that many of each piece that
            another row owns, and the sum of each of its own pieces to every other row.
    """
    rows, whole = range(len(subtrees)), sum(sizes.values())
    sent, owned = [count * whole for count in subtrees], [0] * len(subtrees)
    rows_of_pieces: dict[int, int] = {}
    for number in sorted(sizes, key=lambda piece: (-sizes[piece], piece)):
        size = sizes[number]
        after = [sent[row] + (len(subtrees) - 1 - subtrees[row]) * size for row in rows]
        first, second = nlargest(2, [*sent, 0])
        most = [max(after[row], second if sent[row] == first else first) for row in rows]
        row = min(rows, key=lambda candidate: (most[candidate], owned[candidate], candidate))
        sent[row] = after[row]
        owned[row] += size
        rows_of_pieces[number] = row
    return rows_of_pieces


class RowShare:
    """What one row does in a step of its stage, among all rows of a placement."""

    def __init__(self, config: RunConfig, replica: int, rows: Sequence[Sequence[int]]) -> None:
        """
        Args:
            replica: the own row.
            rows: the groups of each row. Together they are all groups, each once, and those of a row are
                contiguous.

        Raises:
            ValueError: the rows do not fit this description.
        """
        groups = config.pipeline.groups
        runs = [list(run) for run in rows]
        if sorted(group for run in runs for group in run) != list(range(groups)) or any(
            not run or run != list(range(run[0], run[0] + len(run))) for run in runs
        ):
            raise ValueError(
                f"rows compute the groups {runs}; expected a contiguous run of 0..{groups - 1} each"
            )
        self.replica = replica
        self.rows = len(runs)
        self.groups = tuple(runs[replica])
        self.microbatches = microbatches_of(config, self.groups)
        self.tree = GroupTree(groups)
        self.subtrees = tuple(self.tree.subtrees(run) for run in runs)
        """The tree's nodes that each row holds."""
        self.subtree_counts = tuple(map(len, self.subtrees))
        self.whole = StepWork(self, tuple(enumerate(map(tuple, runs))))
        """The work of a step in which every row computes its own groups."""

    @classmethod
    def of(cls, config: RunConfig, placement: Placement) -> "RowShare":
        """The share of a placement's node. Raises ValueError as the constructor."""
        whole = (tuple(range(config.pipeline.groups)),)
        return cls(config, placement.replica, [row.groups for row in placement.rows] or whole)

    def work(
        self,
        portions: Sequence[tuple[int, Sequence[int]]],
        absent: Collection[int],
        late: Sequence[int] = (),
    ) -> "StepWork":
        """The work of a step, with arguments as for `StepWork`. Without portions each row computes its own
        groups."""
        if not portions and not absent and not late:
            return self.whole
        return StepWork(self, portions or self.whole.portions, absent, late)


class StepWork:
    """Who computes which groups of a step, and who sums them, as one node sees it."""

    def __init__(
        self,
        share: RowShare,
        portions: Sequence[tuple[int, Sequence[int]]],
        absent: Collection[int] = (),
        late: Sequence[int] = (),
    ) -> None:
        """
        Args:
            portions: (row, groups) that together are all groups, each once. A row sends the whole subtrees of
                each portion separately. A portion of row `share.rows`, which does not exist, has the groups
                that wait: no sum is complete before a later order gives them to a row.
            absent: rows without a node for this stage.
            late: rows whose node of this stage arrived within the step, in order of arrival. They own no
                piece, so that its present owner keeps it. If no other node is left, the first of them owns
                all.

        Raises:
            ValueError: the arguments do not fit this description.
        """
        groups = sorted(group for _, run in portions for group in run)
        rows = {row for row, _ in portions}
        if groups != list(range(share.tree.groups)) or not rows <= set(range(share.rows + 1)):
            raise ValueError(f"rows are to compute {portions}; expected each group of {share.rows} rows once")
        self.portions: tuple[tuple[int, tuple[int, ...]], ...] = tuple(
            (row, tuple(run)) for row, run in portions
        )
        self.groups = tuple(group for row, run in self.portions for group in run if row == share.replica)
        """The groups of the own row; empty if the row has lost a node."""
        self.sources = {node: row for row, run in self.portions for node in share.tree.subtrees(run)}
        """For each node of the tree that is sent as a whole, the row that has it."""
        self.own = tuple(node for node, row in self.sources.items() if row == share.replica)
        """The nodes of the tree that the own row sends."""
        self.others = tuple(row for row in range(share.rows) if row != share.replica and row not in absent)
        """The rows to which a sum is sent."""
        self._rows, self._no_owners, self._late = share.rows, frozenset((*absent, *late)), late
        self.seats = frozenset(absent), tuple(late)
        """As in the arguments: by these it is decided who owns a piece."""

    def owner(self, first: int, piece: int) -> int:
        """The row that sums a piece: `first`, or another row if that one has no node.

        A row keeps its pieces, however many other rows lose their nodes.
        """
        return self._first_able(first, piece, self._no_owners, self._late)

    def heir(self, row: int, first: int, piece: int) -> int:
        """The row other than `row` that sums a piece, or would sum it without that row's node; `row` if no
        other has a node."""
        without = self._no_owners.union((row,))
        late = [other for other in self._late if other != row]
        heir = self._first_able(first, piece, without, late)
        return row if heir in without and heir not in late else heir

    def _first_able(self, first: int, piece: int, without: Collection[int], late: Sequence[int]) -> int:
        if first not in without:
            return first
        others = self._rows - 1
        turns = ((first + 1 + (piece + turn) % others) % self._rows for turn in range(others))
        return next((row for row in turns if row not in without), late[0] if late else first)


def sync_bytes(config: RunConfig, units: Iterable[str], share: RowShare, *, of_round: bool = False) -> int:
    """The bytes that the own row's node, with these units, sends to other rows in an exact step or a
    round."""
    pieces = model_pieces(config, of_round=of_round)
    sizes = {piece.number: piece_bytes(piece) for unit in units for piece in pieces[unit]}
    if share.rows == 1:
        return 0
    rows = owners(sizes, share.subtree_counts)
    owned = sum(sizes[number] for number, row in rows.items() if row == share.replica)
    return (sum(sizes.values()) - owned) * share.subtree_counts[share.replica] + owned * (share.rows - 1)
