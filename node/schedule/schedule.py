"""Pipeline schedules as pure data: which chunk runs which microbatch, in which order, on each stage.

A pipeline of `stages` processes with `chunks` model chunks per stage has stages × chunks global chunks. Local
chunk c of stage s is global chunk c·stages + s. Chunk j's activation crosses boundary j to chunk j + 1, and
its gradient returns over boundary j. With `head_first` the head is one more chunk after all of these. It is
then on the first stage, which runs each microbatch's loss forward and backward at once.

Every schedule here is 1F1B (PipeDream-flush; Narayanan et al. 2021, arXiv 2104.04473, section 2.2): a stage
runs forwards up to its in-flight limit (warm-up), then alternates one forward with one backward, then drains.
The schedules differ in their limits, and in which chunk comes next. In every schedule the gradients of a
chunk are produced in increasing order of microbatch, so that accumulating them gives the same bits for every
split and window.

A microbatch may be cut along the sequence into slices (Seq1F1B, arXiv 2406.03488, section 3), each with its
own passes and boundary tensors. Attention sees all earlier slices, so forwards go from the first slice to the
last and backwards from the last to the first. A stage runs all forwards of a microbatch before its first
backward, and limits count slices. A head on the first stage does not need other slices, so it runs each
slice's loss forward and backward at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from wire.errors import ConfigError


class Kind(StrEnum):
    """What a stage does with a chunk, and what a boundary carries: activations forward, gradients
    backward."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True)
class Action:
    """One chunk's forward or backward of one slice of a microbatch. `chunk` is local to the stage, from 0 to
    chunks - 1."""

    kind: Kind
    chunk: int
    microbatch: int
    slice: int = 0

    def __str__(self) -> str:
        part = f", slice {self.slice}" if self.slice else ""
        return f"{self.kind} of chunk {self.chunk}, microbatch {self.microbatch}{part}"


Order = tuple[Action, ...]
"""The actions of one stage in a step, first to last."""

Orders = tuple[Order, ...]
"""One order per stage, first stage first."""


@dataclass(frozen=True, slots=True)
class BoundaryTensor:
    """A tensor between two chunks: an activation (FORWARD) or its gradient (BACKWARD) at a boundary."""

    kind: Kind
    boundary: int
    microbatch: int
    slice: int = 0


@dataclass(frozen=True, slots=True)
class Dependencies:
    """The tensor for which an action waits and the one that it produces; None at the ends of the pipeline.

    A backward also needs what its own chunk's forward of the same slice kept, and the gradients of its keys
    and values, which come from the backwards of later slices.
    """

    needs: BoundaryTensor | None
    makes: BoundaryTensor | None


Window = int | Sequence[int]
"""Extra microbatches in flight, or slices if microbatches are cut. It is the same number for every link, or
one number per link, first link first. With `head_first` the last one is for the link from the last stage to
the first."""


def schedule(
    stages: int,
    chunks: int,
    microbatches: int,
    window: Window = 0,
    *,
    head_first: bool = False,
    slices: int = 1,
) -> Orders:
    """The order of every stage: plain 1F1B for one chunk per stage, interleaved 1F1B for more.

    Interleaved 1F1B has one window for all links. If there are several, it takes the widest.

    Raises:
        ConfigError: stages, chunks, microbatches or slices are below 1; a window is negative; there is not
            one window per link; `head_first` with a single stage; or several slices with several chunks.
    """
    if chunks > 1 and slices > 1:
        raise ConfigError("slices shorten fill and drain by themselves: give 1 chunk a stage, or 1 slice")
    if head_first and stages < 2:
        raise ConfigError("a single stage has its head in its only chunk; head_first needs at least 2 stages")
    if chunks == 1:
        return one_f_one_b(stages, microbatches, window, head_first=head_first, slices=slices)
    widest = window if isinstance(window, int) else max(window, default=0)
    return interleaved_1f1b(stages, chunks, microbatches, widest, head_first=head_first)


def one_f_one_b(
    stages: int, microbatches: int, window: Window = 0, *, head_first: bool = False, slices: int = 1
) -> Orders:
    """Plain 1F1B with `window` extra slices in flight on each link.

    Stage i holds at most `slices` + (links - i)(1 + window) slices between their forward and backward.
    `links` is stages - 1, plus one with `head_first`. Window 0 is the textbook schedule. A transfer is hidden
    once window × (forward + backward time) covers the round trip over a link.
    """
    links = stages - 1 + head_first
    windows = [window] * links if isinstance(window, int) else list(window)
    _check_sizes(stages, 1, microbatches, min(windows, default=0), slices)
    if len(windows) != links:
        raise ConfigError(f"{len(windows)} windows given; {stages} stages have {links} links")
    limits = [slices + sum(1 + ahead for ahead in windows[stage:]) for stage in range(stages)]
    forwards = [(0, m) for m in range(microbatches)]
    orders = tuple(_alternate(forwards, forwards, limit, slices) for limit in limits)
    return (_with_head(orders[0], 1), *orders[1:]) if head_first else orders


def interleaved_1f1b(
    stages: int, chunks: int, microbatches: int, window: int = 0, *, head_first: bool = False
) -> Orders:
    """Interleaved 1F1B (arXiv 2104.04473, section 2.2) with `window` extra microbatches in flight per link.

    Microbatches pass in groups: all of a group through local chunk 0, then through chunk 1, and so on;
    backward goes through the chunks in the opposite order. Any number of microbatches works. There are as
    many groups of at least stages × (1 + ceil(window / 2)) as fit (or a single smaller one), as equal as
    possible, larger ones first. If they are equal, window 0 is the order of torch's ScheduleInterleaved1F1B,
    which refuses other numbers. Groups grow by half the window, because the window covers a round trip, so
    that a microbatch is back at the first stage in time for its next chunk.

    Stage i holds at most 1 + (chunks - 1) × largest group + (links - i)(2 + window) chunk activations, with
    links as in `one_f_one_b`. With one chunk this is plain 1F1B with one more microbatch per link, as in
    torch. `schedule` does not use it then.
    """
    _check_sizes(stages, chunks, microbatches, window, 1)
    count = max(1, microbatches // (stages * (1 + (window + 1) // 2)))
    size, larger = divmod(microbatches, count)
    forwards: list[tuple[int, int]] = []
    backwards: list[tuple[int, int]] = []
    start = 0
    for group in range(count):
        end = start + size + (group < larger)
        forwards += [(c, m) for c in range(chunks) for m in range(start, end)]
        backwards += [(c, m) for c in reversed(range(chunks)) for m in range(start, end)]
        start = end

    # There is no deadlock if limits differ by less than two groups from the first stage to the last: then
    # numbers can be given to all actions such that each is above those of the actions it waits for. A single
    # group, however small, is safe too: only its last chunk's forwards wait for backwards, as in plain 1F1B.
    largest = size + (larger > 0)
    links = stages - 1 + head_first
    limits = [1 + (chunks - 1) * largest + (links - i) * (2 + window) for i in range(stages)]
    orders = tuple(_alternate(forwards, backwards, limit, 1) for limit in limits)
    return (_with_head(orders[0], chunks), *orders[1:]) if head_first else orders


def _with_head(order: Order, chunk: int) -> Order:
    """The first stage's order with each slice's head (local chunk `chunk`), forward and backward at once.

    A last slice's head is halfway between the forward and the backward of the previous chunk, because the way
    to the head and the way back are equally long. The heads of other slices follow their forwards at the same
    distance.
    """
    place = {action: index for index, action in enumerate(order)}
    forwards = [action for action in order if action.chunk == chunk - 1 and action.kind is Kind.FORWARD]
    last = max(action.slice for action in forwards)
    after: dict[int, list[Action]] = {}
    position = 0
    for action in sorted(forwards, key=lambda action: (action.microbatch, action.slice)):
        begin, end = (place[replace(action, kind=kind, slice=last)] for kind in Kind)
        # Not before the head of an earlier slice, when a drain brings microbatches closer together.
        position = max(position, place[action] + (end - begin) // 2)
        after.setdefault(position, []).extend(replace(action, kind=kind, chunk=chunk) for kind in Kind)
    return tuple(step for index, action in enumerate(order) for step in (action, *after.get(index, ())))


def _alternate(
    forwards: list[tuple[int, int]], backwards: list[tuple[int, int]], limit: int, slices: int
) -> Order:
    """1F1B over the slices of (chunk, microbatch) pairs, with at most `limit` forwards without their
    backward."""
    forward = [Action(Kind.FORWARD, c, m, s) for c, m in forwards for s in range(slices)]
    backward = [Action(Kind.BACKWARD, c, m, s) for c, m in backwards for s in reversed(range(slices))]
    ahead = min(limit, len(forward)) - 1

    warmup = forward[:ahead]
    steady = [action for pair in zip(forward[ahead:], backward, strict=False) for action in pair]
    cooldown = backward[len(backward) - ahead :]
    return (*warmup, *steady, *cooldown)


def held_activations(order: Order) -> int:
    """The most slices of chunk activations that a stage holds at once over its order."""
    held = peak = 0
    for action in order:
        held += 1 if action.kind is Kind.FORWARD else -1
        peak = max(peak, held)
    return peak


def dependencies(
    action: Action, stage: int, stages: int, chunks: int, *, head_first: bool = False
) -> Dependencies:
    """The boundary tensors that `action` on `stage` needs and produces."""
    chunk = action.chunk * stages + stage
    before, after = chunk - 1, chunk
    arrives, leaves = (before, after) if action.kind is Kind.FORWARD else (after, before)
    last = stages * chunks - 1 + head_first

    def tensor(boundary: int) -> BoundaryTensor | None:
        if not 0 <= boundary < last:
            return None
        return BoundaryTensor(action.kind, boundary, action.microbatch, action.slice)

    return Dependencies(needs=tensor(arrives), makes=tensor(leaves))


def has_head_first(orders: Orders) -> bool:
    """Whether the first stage has one more chunk than the others."""
    most = [max((action.chunk for action in order), default=-1) for order in orders]
    return len(orders) > 1 and most[0] == max(most[1:]) + 1


def _check_sizes(stages: int, chunks: int, microbatches: int, window: int, slices: int) -> None:
    for name, value, least in (
        ("stages", stages, 1),
        ("chunks", chunks, 1),
        ("microbatches", microbatches, 1),
        ("slices", slices, 1),
        ("window", window, 0),
    ):
        if value < least:
            raise ConfigError(f"a schedule cannot have {name} = {value}: give at least {least}")
