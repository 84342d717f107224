"""The grid of a run: stages across, rows down. Pure.

A row is a whole pipeline and a replica of the others. The nodes of a grid are one sequence, row after row,
so a grid with one row is the sequence of its stages.
"""

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from statistics import median

from node.schedule.gradient_groups import GroupTree
from node.tuning.decisions import GAIN, WATCHED, WORSE, pays

Groups = tuple[tuple[int, ...], ...]
"""The gradient groups of each row."""
ONE_ROW: Groups = ((0,),)

SHARED_STEPS = 30
"""How many steps an epoch has before its groups may move; twice as many after each move, because speeds
vary."""
MOST_SHARED_STEPS = 1000
REMEMBERED_STEPS = 30
"""A node's speed is the median of this many steps. Groups move only when there are this many."""
LEAST_STEPS = 5
"""A node's speed counts as known after this many steps."""
HELD_GROUPS = 2
"""The fewest groups that a row holds when a step begins with broken rows: the one that it computes, and the
next."""
PROMPT_SECONDS = 2.0
"""A row holds as many groups as take `HELD_GROUPS` times this long, because messages about shorter work would
cost more than they save."""
HANDED_TIMES = 2.0
"""A node counts as taking at least the time to its hand-over divided by this: its sums must also be sent."""
LEAST_SECONDS = 0.001
"""No row takes less than this for a group. It counts, too, where no row's time is known, so that no group
waits."""
MOST_TRIALS = 2**20
"""The most trials of the exact search for a sharing. Beyond it, rows with more groups simply come first."""


def holders_by_stage(holders: Sequence[str | None], rows: int, present: Collection[str]) -> list[list[str]]:
    """The present nodes of each stage, those of whole rows first, else in order of rows."""
    stages = len(holders) // rows
    split = [holders[row * stages : (row + 1) * stages] for row in range(rows)]
    split.sort(key=lambda row: not all(node in present for node in row))
    return [
        [node for row in split if (node := row[stage]) is not None and node in present]
        for stage in range(stages)
    ]


def by_row(by_stage: Sequence[Sequence[str | None]], rows: int) -> list[str | None]:
    """The first `rows` nodes of each stage as a grid; None where there are fewer."""
    return [nodes[row] if row < len(nodes) else None for row in range(rows) for nodes in by_stage]


def share_groups(groups: int, row_seconds: Sequence[float | None], current: Groups | None = None) -> Groups:
    """Give each row a contiguous run of groups, so that the slowest row is done as early as possible.

    Every row has a group at least. Of sharings in which a step is as short, it is one whose rows have the
    fewest whole subtrees, since a row sends each of its own; then the one that keeps other rows short too.

    Args:
        groups: at least as many as rows.
        row_seconds: what each row takes for a group; None where that is not known.
        current: how groups are shared now. It stays where another sharing gains less than `GAIN`.
    """
    known = [seconds for seconds in row_seconds if seconds is not None]
    usual = median(known) if known else 1.0
    seconds = [usual if each is None else each for each in row_seconds]
    counts = [1] * len(seconds)
    for _ in range(groups - len(seconds)):
        # The next group goes where it is done first: no other sharing has a shorter maximum.
        counts[min(range(len(seconds)), key=lambda row: ((counts[row] + 1) * seconds[row], row))] += 1
    best = max(count * each for count, each in zip(counts, seconds, strict=True))
    rows = len(seconds)
    if (
        current is not None
        and _fits(current, groups, rows)
        and best > (1 - GAIN) * _longest(current, seconds)
    ):
        return current
    if (rows << rows) * groups**2 <= MOST_TRIALS:
        return _fewest_subtrees(groups, seconds, best)
    first, runs = 0, {}
    for row in sorted(range(rows), key=lambda row: (-counts[row], row)):
        runs[row] = tuple(range(first, first := first + counts[row]))
    return tuple(runs[row] for row in range(rows))


def _fewest_subtrees(groups: int, seconds: Sequence[float], longest: float) -> Groups:
    """The sharing with fewest subtrees in all of those in which no row takes longer than `longest`."""
    tree, everyone = GroupTree(groups), (1 << len(seconds)) - 1
    # Sums of whole numbers do not depend on the order, so that rows of equal speed stay in theirs.
    weights = [round(1e6 * each / longest) if longest else 0 for each in seconds]
    none = (math.inf, math.inf)

    @cache
    def rest(first: int, placed: int) -> tuple[tuple[float, float], int, int]:
        """The best solution from a group on: (subtrees, squares of rows' times), the row there, and where it
        ends."""
        if placed == everyone:
            return ((0, 0) if first == groups else none), -1, first
        best = none, -1, first
        left = len(seconds) - placed.bit_count()
        for row, each in enumerate(seconds):
            if placed >> row & 1:
                continue
            for end in range(groups - left + 1, first, -1):
                if (end - first) * each > longest:
                    continue
                (subtrees, squares), *_ = rest(end, placed | 1 << row)
                subtrees += tree.subtree_count(first, end)
                cost = subtrees, squares + ((end - first) * weights[row]) ** 2
                best = min(best, (cost, row, end), key=lambda way: way[0])
        return best

    runs: dict[int, tuple[int, ...]] = {}
    first = placed = 0
    while placed != everyone:
        _, row, end = rest(first, placed)
        runs[row] = tuple(range(first, end))
        first, placed = end, placed | 1 << row
    return tuple(runs[row] for row in range(len(seconds)))


def _longest(groups: Groups, seconds: Sequence[float]) -> float:
    """The seconds of the slowest row, from what each row takes per group."""
    return max(len(run) * each for run, each in zip(groups, seconds, strict=True))


def _fits(current: Groups, groups: int, rows: int) -> bool:
    """Whether a sharing is one of so many groups over so many rows."""
    return len(current) == rows and sorted(group for run in current for group in run) == list(range(groups))


def row_seconds(hosts: Sequence[str], rows: int, seconds: Mapping[str, float]) -> list[float | None]:
    """The seconds that each row takes per group, which are those of its slowest node; None if a node's time
    is not known.

    Args:
        seconds: of each node for a group.
    """
    stages = len(hosts) // rows
    times = [[seconds.get(node) for node in hosts[row * stages : (row + 1) * stages]] for row in range(rows)]
    return [max(each or 0.0 for each in row) if None not in row else None for row in times]


Runs = tuple[tuple[int, tuple[int, ...]], ...]
"""Rows, each with groups."""


class StepGroups:
    """Which rows compute which groups of one step.

    While rows are broken, each row holds the group that it computes and the next one. The other groups
    wait, and a row that becomes whole within the step takes its share of them. A row does not get back a
    group that it has lost in the step, because its nodes still keep what they computed of it.
    """

    def __init__(self, shared: Mapping[int, Sequence[int]], now: float) -> None:
        """`shared`: the groups of each row that computes some, from `now` on."""
        self.runs: Runs = tuple((row, tuple(groups)) for row, groups in shared.items())
        """Groups that a row got at a time."""
        self.waiting: list[int] = []
        """Groups that no row has."""
        self._by_row = dict[int, list[tuple[int, ...]]]()
        self._sorted: Runs | None = None
        """The runs of each row, and the `runs` that they are of: a thousand nodes ask for their own."""
        self._began = now
        self._had: dict[int, set[int]] = {}
        """The groups that each row has lost."""
        self.given_at: dict[int, float] = {}
        """When each row got groups last, if it got any within the step."""
        self._free_at: dict[int, float] = {}
        """When each row will finish its groups, by estimate. A row without an entry has worked on them since
        the step began."""

    def hold_back(self, seconds: Mapping[int, float | None]) -> None:
        """Let groups wait that no row computes soon. Call it as the step begins."""
        known = _known_seconds(seconds)
        runs = []
        for row, groups in self.runs:
            held = max(HELD_GROUPS, math.ceil(HELD_GROUPS * PROMPT_SECONDS / known[row]))
            runs.append((row, groups[:held]))
            self.waiting += groups[held:]
        self.runs = tuple(runs)
        self.waiting.sort()

    def of(self, row: int) -> tuple[int, ...]:
        """The groups of a row."""
        return tuple(group for groups in self.runs_of(row) for group in groups)

    def runs_of(self, row: int) -> Sequence[tuple[int, ...]]:
        """The groups that a row got at a time."""
        if self._sorted is not self.runs:
            self._sorted, self._by_row = self.runs, {}
            for other, groups in self.runs:
                self._by_row.setdefault(other, []).append(groups)
        return self._by_row.get(row, ())

    def lose(self, row: int, kept: Collection[int] = ()) -> None:
        """A row computes nothing any more: its groups wait, except for those that it has `kept`."""
        lost = [group for group in self.of(row) if group not in kept]
        self.waiting = sorted((*lost, *self.waiting))
        self._had.setdefault(row, set()).update(lost)
        runs = [
            (other, tuple(group for group in groups if other != row or group in kept))
            for other, groups in self.runs
        ]
        self.runs = tuple((other, groups) for other, groups in runs if groups)
        self._free_at.pop(row, None)

    def is_for(self, row: int) -> bool:
        """Whether a group waits that a row may take."""
        return any(group not in self._had.get(row, ()) for group in self.waiting)

    def has_lost(self, row: int) -> bool:
        """Whether a row has lost groups in the step."""
        return row in self._had

    def can_give(self, rows: Collection[int], lost: Iterable[int] = ()) -> bool:
        """Whether these rows may compute all groups that wait, and those of `lost`."""
        return all(
            any(group not in self._had.get(row, ()) for row in rows) for group in (*self.waiting, *lost)
        )

    def give(self, seconds: Mapping[int, float | None], now: float, audited: Collection[int] = ()) -> bool:
        """Give groups that wait to the rows that are done with them soonest, once these need them; whether
        any row got some.

        Args:
            seconds: what a group takes, for each row that may get some; None where that is not known.
            audited: the rows that compute a group of another row, too.
        """
        known, left = _known_seconds(seconds), list[int]()
        given: dict[int, list[int]] = {}
        done = {
            row: max(now, self._free_at.get(row, self._began + (len(self.of(row)) + (row in audited)) * each))
            for row, each in known.items()
        }
        # Where times are not known, those that have the fewest.
        counts = {row: len(self.of(row)) for row in known}
        for group in self.waiting:
            free_at = {row: at for row, at in done.items() if group not in self._had.get(row, ())}
            row = min(
                free_at, key=lambda other: (free_at[other] + known[other], counts[other], other), default=None
            )
            if row is None or free_at[row] - now > max(known[row], PROMPT_SECONDS):
                left.append(group)
                continue
            done[row] = self._free_at[row] = done[row] + known[row]
            counts[row] += 1
            given.setdefault(row, []).append(group)
        self.waiting = left
        self.runs += tuple((row, tuple(groups)) for row, groups in sorted(given.items()))
        self.given_at.update(dict.fromkeys(given, now))
        return bool(given)


def _known_seconds(seconds: Mapping[int, float | None]) -> dict[int, float]:
    """The seconds that rows take per group, `LEAST_SECONDS` at least; the usual time if a row's is not
    known."""
    usual = median([each for each in seconds.values() if each is not None] or [LEAST_SECONDS])
    return {row: max(usual if each is None else each, LEAST_SECONDS) for row, each in seconds.items()}


class GroupSharing:
    """Decides which groups each row computes, from the speed that its nodes report.

    Reports may be false. If steps take longer after groups moved, they move back: then rows that got more
    count as taking the whole step for them, for a while.
    """

    def __init__(self, groups: int) -> None:
        self._times: dict[str, deque[float]] = {}
        """Seconds of each node for a group, in the newest steps."""
        self._uneven: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        """Seconds for a group in the newest steps in which rows computed other groups than they were placed
        with; the median of all nodes."""
        self._handed: dict[str, deque[float]] = {}
        """Seconds per group after which each node had handed over its groups, in the newest steps."""
        self._steps: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        """Seconds of the newest steps with the current sharing."""
        self._groups = groups
        self._current: Groups | None = None
        self._hosts: tuple[str, ...] = ()
        self._wait = SHARED_STEPS
        self._before: tuple[Groups, float, float] | None = None
        """The sharing before the newest move, the usual seconds of its steps, and those that its slowest row
        needed; None once steps are compared."""
        self._reverts = False
        """Whether the newest move is to be undone."""
        self._least: dict[str, float] = {}
        """Seconds for a group of nodes that had reported less, as steps showed."""
        self._found: tuple[Sequence[str], Groups, tuple[Groups, float]] | None = None
        """Hosts, sharing and `_better` of them, from what is measured so far."""
        self._began: float | None = None
        """When the epoch began; None once its first step was measured."""
        self._change_seconds = math.inf
        """The shortest time an epoch took to begin; moving groups loads no state."""

    def measured(self, seconds: Mapping[str, float], step_seconds: float, now: float) -> None:
        """Record what nodes took per group in the newest step, which took `step_seconds` and has just
        ended."""
        if self._began is not None:
            self._change_seconds = min(self._change_seconds, max(0.0, now - self._began - step_seconds))
            self._began = None
        self._found = None
        self._steps.append(step_seconds)
        for node, took in seconds.items():
            self._times.setdefault(node, deque(maxlen=REMEMBERED_STEPS)).append(took)
        if self._before is not None and len(self._steps) == WATCHED:
            self._compare(*self._before)

    def _row_times(self, groups: Groups) -> list[float]:
        """The seconds that each row needs for its groups, by the newest reports of its nodes."""
        newest = {node: median([*times][-WATCHED:]) for node, times in self._times.items()}
        each = row_seconds(self._hosts, len(groups), newest)
        return [len(run) * (took or 0.0) for run, took in zip(groups, each, strict=True)]

    def _compare(self, before: Groups, usual: float, needed: float) -> None:
        """Groups have moved: see whether steps take longer than before, and rows that got none do not say
        that they need that time. `usual` are the seconds of a step before, and `needed` of its slowest
        row."""
        self._before, took, margin = None, median(self._steps), WORSE * usual
        if self._current is None or took <= usual + margin:
            return
        got = [len(groups) > len(was) for was, groups in zip(before, self._current, strict=True)]
        rows = zip(self._row_times(self._current), got, strict=True)
        if max((seconds for seconds, more in rows if not more), default=0.0) > needed + margin:
            return
        self._reverts = True
        stages = len(self._hosts) // len(before)
        for row, groups in enumerate(self._current):
            if got[row]:
                nodes = self._hosts[row * stages : (row + 1) * stages]
                self._least.update(dict.fromkeys(nodes, took / len(groups)))

    def seconds(self, node: str) -> float | None:
        """The seconds that a node usually takes per group; None if they are not known yet."""
        times = self._times.get(node, ())
        return max(median(times), self._least.get(node, 0.0)) if len(times) >= LEAST_STEPS else None

    def measured_unevenly(self, seconds: Mapping[str, float]) -> None:
        """Record what some nodes took per group in a step in which rows computed other groups than placed."""
        if seconds:
            self._uneven.append(median(seconds.values()))

    def handed_over(self, node: str, seconds: float) -> None:
        """A node has handed over all groups of its row, after so many seconds for each."""
        self._handed.setdefault(node, deque(maxlen=REMEMBERED_STEPS)).append(seconds)

    def estimate(self, node: str) -> float | None:
        """As `seconds`, or what nodes take in uneven steps. Where seats change in nearly every step, nothing
        else may be known. It is no less than its hand-overs show."""
        own = self.seconds(node)
        if own is None and self._uneven:
            own = median(self._uneven)
        handed = self._handed.get(node)
        return own if own is None or not handed else max(own, median(handed) / HANDED_TIMES)

    def groups_for(self, hosts: Sequence[str], *, rows: int, now: float) -> Groups:
        """The sharing for the epoch that begins; as before while another gains little."""
        before, same = self._current, tuple(hosts) == self._hosts
        self._hosts, self._began = tuple(hosts), now
        self._before, self._reverts = None, False
        if same and before is not None and len(before) == rows:
            self._current = self._better(hosts, before)[0]
        else:
            seconds = {node: took for node in hosts if (took := self.seconds(node)) is not None}
            self._current = share_groups(self._groups, row_seconds(hosts, rows, seconds), before)
        if before is not None and len(before) == rows and before != self._current:
            self._wait = min(2 * self._wait, MOST_SHARED_STEPS)
            if same and self._steps:
                usual = median(self._steps)
                self._before = before, usual, max(self._row_times(before))
        if not same or before != self._current:
            self._steps.clear()
            self._found = None
        return self._current

    def may_gain(self, hosts: Sequence[str], groups: Groups, *, steps: int, left: int) -> bool:
        """Whether it pays to move groups of this grid, which has done `steps` and has so many `left`."""
        if len(groups) == 1 or (steps < self._wait and not self._reverts):
            return False
        if self._least and steps >= self._wait:
            self._least.clear()
            self._found, self._reverts = None, False
        saved = self._better(hosts, groups)[1]
        return pays(saved, 0.0, cost=self._change_seconds, steps_left=left)

    def _better(self, hosts: Sequence[str], current: Groups) -> tuple[Groups, float]:
        """A sharing with a step shorter by `GAIN`, and the seconds that it saves; the current one and 0."""
        # It is asked for with each commit, and measurements of short steps come more rarely.
        if self._found is None or self._found[:2] != (hosts, current):
            self._found = hosts, current, self._look(hosts, current)
        return self._found[2]

    def _look(self, hosts: Sequence[str], current: Groups) -> tuple[Groups, float]:
        times = {
            node: sorted(max(took, self._least.get(node, 0.0)) for took in self._times.get(node, ()))
            for node in hosts
        }
        if len(self._steps) < LEAST_STEPS or any(len(taken) < REMEMBERED_STEPS for taken in times.values()):
            return current, 0.0

        def rows_at(part: float) -> list[float]:
            at = {node: taken[int(part * (len(taken) - 1))] for node, taken in times.items()}
            return [each or 0.0 for each in row_seconds(hosts, len(current), at)]

        usual = rows_at(0.5)
        other = share_groups(self._groups, usual, current)
        saved = _longest(current, usual) - _longest(other, usual)
        # Noise makes one of equal rows look faster, but not its slow steps shorter than another's fast ones.
        certain = _longest(other, rows_at(0.75)) < _longest(current, rows_at(0.25))
        if other == current or not certain or not pays(saved, median(self._steps), cost=0.0, steps_left=1):
            return current, 0.0
        return other, saved


def spare_stages(spares: Sequence[str], held: Mapping[str, int], stages: int) -> dict[str, int]:
    """The stage that each spare prepares for: the one that it had, else the one that has fewest spares.

    Args:
        held: the stage that a node had last.
    """
    chosen = {node: held[node] for node in spares if 0 <= held.get(node, -1) < stages}
    copies = [list(chosen.values()).count(stage) for stage in range(stages)]
    for node in spares:
        if node not in chosen:
            stage = min(range(stages), key=lambda at: (copies[at], at))
            chosen[node] = stage
            copies[stage] += 1
    return chosen
