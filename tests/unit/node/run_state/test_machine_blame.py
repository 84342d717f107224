"""A step keeps failing although no node is dead: spares replace hosts, the most suspect one first."""

from collections.abc import Callable, Iterable

import pytest

from node.run_state.actions import Aborted, Action, Announce
from node.run_state.epoch import Phase
from node.run_state.failures import MAX_RETRIES
from tests.support.machine_driver import REGROUP, Driver, finishes, of_kind, placement_of, stop_of
from wire.messages import FailureKind, StepFailed

Told = tuple[str, StepFailed] | None
INTERNAL = FailureKind.INTERNAL


def said(run: Driver, node_id: str, kind: FailureKind, peer: str = "") -> Told:
    stage = run.epoch.hosts.index(peer) if peer else -1
    words = f"the link to stage {stage} (node {peer}) was not up within 60 s" if peer else "the disk is full"
    return node_id, StepFailed(
        epoch=run.epoch.number,
        step=run.epoch.step,
        kind=kind,
        message=words,
        peer_stage=stage,
    )


def link(run: Driver, node_id: str, peer: str) -> Told:
    return said(run, node_id, FailureKind.LINK, peer)


def attempts(run: Driver, fault: Callable[[Driver], Told], most: int = 100) -> list[Action]:
    """Stages take their places and the step fails, until it does not or the run ends; gives all actions."""
    actions: list[Action] = []
    for _ in range(most):
        told = fault(run) if run.machine.epoch is not None else None
        if told is None:
            break
        node_id, message = told
        actions += run.machine.message(node_id, message, run.time)
        if run.machine.epoch is not None:
            run.all_placed(run.epoch.step)
    return actions


def broken(*nodes: str) -> Callable[[Driver], Told]:
    """Every start of a stage on these nodes fails."""

    def fault(run: Driver) -> Told:
        seated = [node for node in run.epoch.hosts if node in nodes]
        return said(run, seated[0], INTERNAL) if seated else None

    return fault


def cut_off(bad: str, accusers: Iterable[str] = ()) -> Callable[[Driver], Told]:
    """No link to this node comes up. `accusers` tell of it, in turn, where they are at an end of one."""
    turn = 0

    def fault(run: Driver) -> Told:
        nonlocal turn
        hosts = run.epoch.hosts
        if bad not in hosts:
            return None
        at = hosts.index(bad)
        around = [hosts[stage] for stage in (at - 1, at + 1) if 0 <= stage < len(hosts)]
        teller = [*accusers][turn % len([*accusers])] if accusers else around[0]
        turn += 1
        if teller == bad:
            return link(run, bad, around[turn % len(around)])
        return link(run, teller if teller in around else around[0], bad)

    return fault


def with_spares(spares: str, nodes: str = "abc") -> Driver:
    run = Driver(stages=len(nodes), every=2).started(nodes, 2)
    run.join(spares)
    return run


def test_a_spare_takes_the_stage_of_a_node_that_keeps_failing() -> None:
    run = with_spares("x")
    actions = attempts(run, broken("b"))
    assert run.epoch.hosts == ("a", "x", "c")
    assert len(of_kind(actions, Aborted)) == MAX_RETRIES + 1
    (note,) = of_kind(actions, Announce)
    assert "the disk is full: a spare takes stage 1 from node b" in note.text
    assert finishes(actions) == {} and "b" in run.machine.members, "it stays, as a spare"
    run.all_ready()
    run.steps(1)
    assert run.epoch.step == 3


def test_the_accused_end_of_a_link_is_replaced_before_the_accuser() -> None:
    run = with_spares("xy")
    run.stored(2)

    def fault(run: Driver) -> Told:
        if "a" not in run.epoch.hosts:
            return None
        return said(run, "a", FailureKind.LINK, run.epoch.hosts[1])

    attempts(run, fault, MAX_RETRIES + 1)
    assert run.epoch.hosts == ("a", "x", "c")
    attempts(run, fault)
    assert run.epoch.hosts == ("y", "x", "c")


@pytest.mark.parametrize("accuser", ["", "x"])
def test_an_unreachable_replacement_is_replaced_even_if_it_complained_first(accuser: str) -> None:
    run = with_spares("xy")
    run.die("b")
    assert run.epoch.hosts == ("a", "x", "c")
    run.all_placed(2)
    attempts(run, cut_off("x", accuser))
    assert run.epoch.hosts == ("a", "y", "c")


def test_an_accuser_that_was_wrong_is_replaced_before_another_spare() -> None:
    """It blames one neighbour after the other, also those that are new."""
    run = with_spares("xyz")
    attempts(run, cut_off("a", "a"))
    assert "a" not in run.epoch.hosts
    assert len(set(run.epoch.hosts) & set("xyz")) == 2


def test_a_node_that_gave_up_a_stage_gets_none_in_this_step() -> None:
    run = with_spares("xy")
    attempts(run, broken("b", "x"))
    assert run.epoch.hosts == ("a", "y", "c")


def test_when_no_spare_is_left_the_run_is_given_up() -> None:
    run = with_spares("xy")
    actions = attempts(run, lambda run: said(run, run.epoch.hosts[1], INTERNAL))
    end = stop_of(actions)
    assert end.failed and end.reason.startswith("step 3 failed 4 times in a row, last at stage 1")
    assert len(of_kind(actions, Announce)) == 2, "twice a spare took over"
    assert len(of_kind(actions, Aborted)) == 3 * (MAX_RETRIES + 1) - 1


def test_a_finished_step_clears_all_blame() -> None:
    run = with_spares("x")
    attempts(run, broken("b"))
    run.all_ready()
    run.steps(1, store=False)
    run.die("c")
    assert run.epoch.hosts == ("a", "x", "b")


def test_a_node_that_gave_up_a_stage_is_used_if_there_is_no_other() -> None:
    run = with_spares("x")
    attempts(run, broken("b"))
    run.all_ready()
    assert placement_of(run.die("x")) == ("a", "b", "c")


def test_a_split_of_fewer_stages_changes_hands_too() -> None:
    run = Driver(stages=4, min_stages=2, every=2).started("abcd", 2)
    run.die("b")
    run.die("d")
    run.tick(REGROUP)
    assert run.epoch.hosts == ("a", "c")
    run.restored()
    run.hello("x")
    actions = attempts(run, broken("c"))
    assert run.epoch.hosts == ("a", "x")
    assert len(of_kind(actions, Aborted)) == MAX_RETRIES + 1
    run.all_ready()
    assert run.epoch.phase is Phase.STEPPING, "no epoch is ended for a third stage on the node that failed"


@pytest.mark.parametrize("kind", [FailureKind.LINK, INTERNAL])
def test_a_node_that_fails_a_few_times_in_each_step_is_replaced(kind: FailureKind) -> None:
    """Of a link its other end is tried first. If it breaks again, the one that reports it is next."""
    run, aborted = with_spares("xy"), 0
    while run.epoch.has("a"):
        assert aborted <= 4 * MAX_RETRIES
        for _ in range(MAX_RETRIES - 1):
            if run.epoch.has("a"):
                run.failed("a", kind, peer=1 if kind is FailureKind.LINK else -1)
                run.restored(run.epoch.step)
                aborted += 1
        run.steps(1)
    assert run.machine.quarantined == {}
