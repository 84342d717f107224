"""Audits: which steps have one, where two rows begin to differ, and who turns out to be wrong."""

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from node.model.labels import BatchPart
from node.run_state.actions import Action, Announce, RecordCommit
from node.run_state.audits import Auditor, Contradiction, Difference
from node.run_state.epoch import Epoch, Phase
from tests.support.cases import each
from tests.support.machine_driver import Driver, begins, of_kind, sent, unit_numbers
from wire.messages import Begin, BoundaryEnd, GroupDigests, Placed, Restore, Vote

SECRET = b"known to the coordinator alone"
ALIKE = ("a chip",) * 8
COMPUTES = {0: ["activations", "own gradient"], 1: ["loss", "gradients", "own gradient"]}
"""What a node of each stage may get wrong."""
Flaw = Callable[[str, int], str | None]
"""What a node (its name) computes wrongly in a step; None for nothing. What follows "#" is how."""


# ---- when


def test_audits_take_their_share_of_the_steps_and_spare_no_group() -> None:
    auditor = Auditor(0.25, SECRET, lambda stages: stages - 1)
    groups = ((0, 1), (2,), (3,))
    drawn = [auditor.draw(step, groups, ALIKE[:6]) for step in range(4000)]
    audits = [audit for audit in drawn if audit is not None]
    assert 900 < len(audits) < 1100
    assert {audit.group for audit in audits} == {0, 1, 2, 3}
    assert len({audit.rows for audit in audits}) == 6, "each row is checked by each other one"
    assert all(audit.group in groups[audit.rows[0]] for audit in audits)
    assert drawn == [auditor.draw(step, groups, ALIKE[:6]) for step in range(4000)]
    other = Auditor(0.25, SECRET + b".", lambda stages: stages - 1)
    assert drawn != [other.draw(step, groups, ALIKE[:6]) for step in range(4000)]


def test_only_rows_of_like_nodes_check_each_other() -> None:
    auditor = Auditor(1.0, SECRET, lambda stages: stages - 1)
    kinds = ["one chip", "one chip", "another", "one chip", "one chip", "one chip"]
    rows = {audit.rows for step in range(200) if (audit := auditor.draw(step, ((0,), (1,), (2,)), kinds))}
    assert rows == {(0, 2), (2, 0)}
    assert auditor.draw(0, ((0,), (1,)), kinds[:4]) is None
    assert auditor.draw(0, ((0, 1),), kinds[:2]) is None


def test_newcomers_that_were_refused_are_compared_with_another_row() -> None:
    auditor, groups = Auditor(0.0, SECRET, lambda _: 1, compares=True), ((0, 1), (2,), (3,))
    drawn = []
    for _ in range(3):
        audit = auditor.draw(7, groups, ["", ""] * 3, [2])
        assert audit is not None and audit.extra(2) == (audit.group,)
        drawn.append((audit.group, audit.rows))
        auditor.refused += 1
    assert drawn == [(0, (0, 2)), (2, (1, 2)), (0, (0, 2))]


def test_only_the_auditing_row_knows() -> None:
    run = grid("abcd")
    audit = run.epoch.audit
    assert audit is not None
    begins = {node: m for node in "abcd" for m in run.epoch.outstanding(node) if isinstance(m, Begin)}
    own, other = (run.epoch.row(row) for row in audit.rows)
    assert [begins[node].audited for node in own] == [(), ()]
    assert [begins[node].audited for node in other] == [(audit.group,)] * 2
    assert [run.epoch.may_fetch(node, BatchPart.INPUTS) for node in other] == [True, False]
    assert [run.epoch.may_fetch(node, BatchPart.LABELS) for node in other] == [False, True]


# ---- a model of what nodes compute


def grid(
    nodes: str, *, rate: float = 1.0, rows: int = 2, groups: int = 4, steps: int = 12, alike: bool = True
) -> Driver:
    """Two stages; spares are the nodes that are left over. If not `alike`, each stage has its own kind."""
    run = Driver(stages=2, groups=groups, every=5, steps=steps)
    run.kinds = {} if alike else {node: f"chip {'abcdef'.index(node) % 2}" for node in nodes}
    run.plan = replace(run.plan, audit_rate=rate, audit_secret=SECRET, most_rows=rows)
    run.restart()
    run.join(nodes)
    run.restored()
    assert run.epoch.rows == rows
    return run


def value(*parts: object) -> bytes:
    return hashlib.sha256(repr(parts).encode()).digest()[:16]


def digests(epoch: Epoch, node: str, group: int, flaw: Flaw) -> tuple[GroupDigests, float]:
    """What a node says of a group that its row computed, and the group's loss: from the text on."""
    row = epoch.row(epoch.replica_of(node))

    def wrong(stage: int, what: str) -> str:
        found = flaw(row[stage], epoch.step) or ""
        return row[stage] + found if found.partition("#")[0] == what else ""

    activation = value("activation", epoch.step, group, wrong(0, "activations"))
    loss = int.from_bytes(value("loss", activation, wrong(1, "loss"))[:4]) / 2**32
    gradient = value("gradient", loss, wrong(1, "gradients"))
    stage = epoch.stage_of(node)
    fed = (activation, gradient)
    own = value("own", stage, fed, wrong(stage, "own gradient"))
    ends = {BoundaryEnd(0, backward, backward == (stage == 0)): fed[backward] for backward in (False, True)}
    return GroupDigests(gradient=own, boundaries=ends), loss


def errs(epoch: Epoch, node: str, flaw: Flaw) -> bool:
    found = flaw(node, epoch.step) or ""
    return found.partition("#")[0] in COMPUTES[epoch.stage_of(node)]


def vote(epoch: Epoch, node: str, flaw: Flaw) -> Vote:
    stage, row = epoch.stage_of(node), epoch.replica_of(node)
    extra = epoch.audit.extra(row) if epoch.audit is not None else ()
    own = epoch.groups[row]
    found = {group: digests(epoch, node, group, flaw) for group in (*own, *extra)}
    said = {
        group: replace(one, loss=loss if group in extra and stage == 1 else None)
        for group, (one, loss) in found.items()
    }
    return Vote(
        epoch=epoch.number,
        step=epoch.step,
        norms=dict.fromkeys(unit_numbers(2)[stage], 1.0),
        loss=None,
        group_losses={group: found[group][1] for group in own} if stage == 1 else {},
        digests=said if epoch.rows > 1 else {},
    )


class Play:
    """A run to its end, with nodes that may be wrong."""

    def __init__(self, run: Driver, flaw: Flaw) -> None:
        self.run, self.flaw = run, flaw
        self.notes: list[str] = []
        self.spoiled: list[int] = []
        """Steps that were committed with something wrong in them."""
        self._held = self._state(0)

    def to_the_end(self) -> "Play":
        for _ in range(2000):
            if self.run.machine.stopped:
                return self
            self.turn()
        raise AssertionError("the run does not end")

    def turn(self) -> None:
        run, epoch = self.run, self.run.machine.epoch
        if epoch is None:
            self.note(run.tick(1.0))
            return
        match epoch.phase:
            case Phase.PLACING:
                for node in epoch.hosts:
                    held, lineage, stage = self._held.get(node, (-1, 0, -1))
                    held = held if stage == epoch.stage_of(node) else -1
                    placed = Placed(epoch=epoch.number, held_step=held, voted=False, lineage=lineage)
                    for message in sent(self.note(run.machine.message(node, placed, run.time)), node):
                        if isinstance(message, Restore):
                            run.lineage = message.lineage
            case Phase.RESTORING:
                self._held |= self._state(epoch.step)
                self.note(run.all_ready())
            case Phase.STEPPING:
                for node in epoch.hosts:
                    step, wrong = epoch.step, any(errs(epoch, n, self.flaw) for n in epoch.hosts)
                    actions = self.note(run.machine.message(node, vote(epoch, node, self.flaw), run.time))
                    if of_kind(actions, RecordCommit) and wrong:
                        self.spoiled.append(step)
                    if run.machine.epoch is not epoch:
                        break
                    if epoch.step > step:
                        self._held |= self._state(epoch.step)
                        break
            case Phase.APPLYING:
                step = epoch.step + 1
                self._held |= self._state(step)
                self.note(run.all_applied())
                if step % 5 == 0 and run.machine.newest_snapshot < step and run.machine.epoch is epoch:
                    self.note(run.stored(step))
            case _:
                self.note(run.stored(epoch.step))

    def _state(self, step: int) -> dict[str, tuple[int, int, int]]:
        """All hosts hold their stage's state of this step: its lineage and the stage."""
        epoch = self.run.epoch
        return {node: (step, self.run.lineage, epoch.stage_of(node)) for node in epoch.hosts}

    def note(self, actions: list[Action]) -> list[Action]:
        self.notes += [action.text for action in of_kind(actions, Announce)]
        return actions

    @property
    def struck(self) -> list[str]:
        """Whom the operator reads about."""
        words = ("and two others did not get the same", "twice and got different values")
        lines = [
            note for note in self.notes if note.startswith("node ") and any(one in note for one in words)
        ]
        return [line.split()[1].rstrip(":") for line in lines]


def always(node: str, what: str, first: int = 0) -> Flaw:
    return lambda one, step: what if one == node and step >= first else None


# ---- where


def compared(flaw: Flaw, *, alter: Callable[[str, Vote], Vote] = lambda _, vote: vote) -> object:
    epoch = grid("abcd").epoch
    audit = epoch.audit
    assert audit is not None
    rows = {row: [(n, alter(n, vote(epoch, n, flaw))) for n in epoch.row(row)] for row in audit.rows}
    return Auditor(1.0, SECRET, lambda stages: stages - 1).compare(audit, epoch.step, rows, 1)


@pytest.mark.parametrize(
    ("node", "what", "where"),
    [
        ("a", "activations", "the activations over boundary 0 of stage 0"),
        ("c", "activations", "the activations over boundary 0 of stage 0"),
        ("b", "loss", "the loss of stage 1"),
        ("d", "gradients", "the gradients over boundary 0 of stage 1"),
        ("a", "own gradient", "the gradient of stage 0"),
        ("b", "own gradient", "the gradient of stage 1"),
    ],
)
def test_the_first_difference_is_at_the_stage_that_is_wrong(node: str, what: str, where: str) -> None:
    found = compared(always(node, what))
    assert isinstance(found, Difference) and found.what == where
    assert set(found.reported) == ({"a", "c"} if node in "ac" else {"b", "d"})


def test_without_a_flaw_there_is_no_difference() -> None:
    assert compared(lambda *_: None) is None


def test_two_neighbours_that_say_different_things_of_one_tensor_contradict_each_other() -> None:
    def lie(node: str, said: Vote) -> Vote:
        if node != "c":
            return said
        ends = dict.fromkeys(next(iter(said.digests.values())).boundaries, bytes(16))
        return replace(said, digests={g: replace(one, boundaries=ends) for g, one in said.digests.items()})

    found = compared(lambda *_: None, alter=lie)
    assert isinstance(found, Contradiction) and (found.receiver, found.row, found.stage) == ("d", 1, 0)


@pytest.mark.parametrize(
    "change",
    [
        lambda said: {},
        lambda said: {**said, 9: next(iter(said.values()))},
        lambda said: {group: replace(one, boundaries={}) for group, one in said.items()},
        lambda said: {group: replace(one, loss=1.0) for group, one in said.items()},
    ],
)
def test_digests_that_no_correct_node_sends_are_refused(
    change: Callable[[dict[int, GroupDigests]], dict[int, GroupDigests]],
) -> None:
    run = grid("abcd")
    said = vote(run.epoch, "a", lambda *_: None)
    actions = run.machine.message("a", replace(said, digests=change(dict(said.digests))), run.time)
    assert "a message of node a was refused" in of_kind(actions, Announce)[0].text
    assert "a" not in run.epoch.votes


# ---- who


@each("first", [0, 3, 7])
@each(("node", "what"), [(node, what) for node in "abcd" for what in COMPUTES["abcd".index(node) % 2]])
def test_of_two_that_differ_a_spare_decides_and_no_wrong_step_is_committed(
    node: str, what: str, first: int
) -> None:
    flaw = always(node, what, first)
    play = Play(grid("abcdxy"), flaw).to_the_end()
    assert play.spoiled == []
    assert play.struck == [node], play.notes
    assert play.run.machine.quarantined == {}
    assert node in play.run.machine.members


@pytest.mark.parametrize("node", "abcdef")
def test_of_three_rows_the_third_decides_within_a_few_steps(node: str) -> None:
    play = Play(grid("abcdef", rows=3, groups=3, steps=20), always(node, "own gradient", 2)).to_the_end()
    assert play.struck == [node], play.notes
    assert len(play.spoiled) <= 8, "an audit meets two of three rows"
    assert not any("a spare" in note for note in play.notes)


@each(("node", "what"), [(node, what) for node in "abcd" for what in COMPUTES["abcd".index(node) % 2]])
def test_without_a_spare_a_node_of_the_same_row_changes_places_and_decides(node: str, what: str) -> None:
    play = Play(grid("abcd"), always(node, what, 3)).to_the_end()
    assert play.spoiled == []
    assert play.struck == [node], play.notes
    assert any("have changed places, to tell who is wrong" in note for note in play.notes)
    assert play.run.machine.quarantined == {} and set("abcd") == set(play.run.machine.members)


@pytest.mark.parametrize("node", "abcd")
def test_of_two_of_a_kind_one_that_errs_at_random_is_found_by_computing_twice(node: str) -> None:
    run = grid("abcd", alike=False)

    def flaw(one: str, step: int) -> str | None:
        return f"own gradient#{run.epoch.number}" if one == node and step >= 3 else None

    play = Play(run, flaw).to_the_end()
    assert play.struck == [node], play.notes
    assert any("twice and got different values" in note for note in play.notes)
    assert play.spoiled == []


@pytest.mark.parametrize("node", "abcd")
def test_of_two_of_a_kind_that_differ_alike_the_operator_reads_both_names_once(node: str) -> None:
    play = Play(grid("abcd", alike=False), always(node, "own gradient", 2)).to_the_end()
    assert play.struck == [] and play.run.machine.quarantined == {}
    (line,) = [note for note in play.notes if "no third node can say which" in note]
    stage = "abcd".index(node) % 2
    for row, one in enumerate("ac" if node in "ac" else "bd"):
        assert f"{one} (stage {stage} of row {row})" in line
    (again,) = [note for note in play.notes if note.endswith("it runs again")]
    assert again.startswith("step 3 is not committed"), "a pair that was asked twice costs no step again"


def test_one_that_computes_right_when_it_is_doubted_is_wrong_all_the_same() -> None:
    told: Counter[int] = Counter()

    def once(node: str, step: int) -> str | None:
        return "own gradient" if node == "c" and step == 4 and told[step] == 0 else None

    play = Play(grid("abcdef", rows=3, groups=3, steps=20), once)
    while not any("is not the same" in note for note in play.notes) and not play.run.machine.stopped:
        play.turn()
    told[4] += 1
    play.to_the_end()
    found = any("is not the same" in note for note in play.notes)
    assert play.struck == (["c"] if found else [])


def test_a_rate_of_a_tenth_finds_a_wrong_node_in_about_ten_audits() -> None:
    """`rows / (2 x rate)` steps in the mean: 10, for two rows."""
    needed: list[int] = []
    for trial in range(40):
        run = Driver(stages=2, groups=2, every=1000, steps=400)
        run.plan = replace(run.plan, audit_rate=0.1, audit_secret=SECRET + bytes([trial]))
        run.restart()
        run.join("abcdx")
        run.restored()
        play = Play(run, always("d", "own gradient"))
        while not play.struck:
            play.turn()
        needed.append(len(play.spoiled))
    assert 5 <= sum(needed) / len(needed) <= 15, needed


def test_after_a_death_that_ends_a_comparison_votes_of_the_step_still_have_digests() -> None:
    """Nodes have computed them by then. It was the row of a newcomer, of a run without audits."""
    run = Driver(stages=2, groups=4, every=50, steps=60, follows=True)
    run.plan = replace(run.plan, compares_newcomers=True, most_rows=3)
    run.restart()
    run.started("abcdef", 1)
    epoch, step = run.epoch, run.epoch.step + 1
    epoch.newcomers = frozenset("ef")
    assert {begin.digests for begin in begins(run.step())} == {True}
    assert epoch.step == step and epoch.audit is not None and epoch.audit.rows[1] == 2
    assert {begin.digests for begin in begins(run.die("e"))} == {True}
    assert epoch.audit is None
    for node in epoch.hosts:
        stage, groups = epoch.stage_of(node), epoch.groups_of(epoch.replica_of(node))
        said = Vote(
            epoch=epoch.number,
            step=step,
            norms=dict.fromkeys(unit_numbers(2)[stage], 1.0),
            loss=None,
            group_losses=dict.fromkeys(groups, 2.0) if stage == 1 else {},
            digests={group: digests(epoch, node, group, lambda *_: None)[0] for group in groups},
            generation=epoch.generation,
        )
        actions = run.machine.message(node, said, run.time)
    assert [one.step for one in of_kind(actions, RecordCommit)] == [step]
