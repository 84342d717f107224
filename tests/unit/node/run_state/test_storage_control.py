"""What stages store is on record before a node learns of it, and stays while the run has as many stages."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from node.config.schema import StorageSection
from node.coordinator.decisions import record_plan, recorded_storages
from node.coordinator.store import Store
from node.run_state.actions import Action, RecordPlan, Send
from node.run_state.run_plan import Past
from node.run_state.stage_assignment import StageBytes
from node.run_state.storage_control import StorageControl, no_choice, storage_control
from node.tuning.decisions import StepHistory
from node.tuning.device_memory import Devices
from node.tuning.memory_plan import least_stage_bytes
from node.tuning.storage_choice import (
    StoragePlan,
    allowed_storages,
    chosen_config,
    name_of,
    narrowest,
)
from tests.support.machine_driver import Driver, of_kind, restore_of
from tests.support.stored_runs import run
from wire.errors import UserError

WIDE, NARROW = "none/none/none/none", "none/8/none/none"
BOTH, LITTLE = {WIDE: 1.0, NARROW: 1.1}, {NARROW: 1.1}


def choose(stages: Sequence[Sequence[Mapping[str, float]]]) -> StoragePlan:
    """8 bits where a node has no room for more."""
    return StoragePlan(tuple(WIDE if all(WIDE in node for node in own) else NARROW for own in stages))


def control(history: StepHistory[StoragePlan], plain: StageBytes) -> StorageControl:
    return StorageControl(choose, lambda stages, devices, plan: plain(stages, devices), history)


def recorded(actions: Sequence[Action]) -> list[tuple[int, tuple[str, ...]]]:
    return [(one.step, one.plan.names) for one in of_kind(actions, RecordPlan)]


def test_storages_follow_what_nodes_say_and_are_on_record_before_a_node_receives_them() -> None:
    machine = Driver(stages=3, fits={"a": BOTH, "b": LITTLE, "c": BOTH}, storages=control)
    machine.join("abc")
    actions = machine.all_placed()
    assert recorded(actions) == [(0, (WIDE, NARROW, WIDE))]
    assert isinstance(actions[0], RecordPlan)
    assert restore_of(actions).storages == (WIDE, NARROW, WIDE)
    assert machine.epoch.storages == StoragePlan((WIDE, NARROW, WIDE))


def test_a_node_that_takes_a_stage_over_stores_as_the_one_before_did() -> None:
    machine = Driver(stages=3, fits={"a": BOTH, "b": LITTLE, "c": BOTH, "d": LITTLE}, storages=control)
    machine.join("abcd")
    machine.all_placed()
    machine.all_ready()
    machine.die("a")
    actions = machine.all_placed()
    assert recorded(actions) == []
    assert restore_of(actions).storages == (WIDE, NARROW, WIDE)
    assert "d" in machine.epoch.hosts


def test_a_resumed_run_has_what_is_on_record_whatever_its_nodes_offer_now() -> None:
    history = StepHistory(((0, StoragePlan((NARROW, WIDE, NARROW))),))
    machine = Driver(stages=3, past=Past(storages=history), storages=control)
    machine.join("abc")
    actions = machine.all_placed()
    assert recorded(actions) == []
    assert restore_of(actions).storages == (NARROW, WIDE, NARROW)


def test_another_number_of_stages_is_chosen_for_anew() -> None:
    history = StepHistory(((0, StoragePlan((NARROW, NARROW))),))
    machine = Driver(stages=3, fits={"b": LITTLE}, past=Past(storages=history), storages=control)
    machine.join("abc")
    actions = machine.all_placed()
    ((step, names),) = recorded(actions)
    assert (step, len(names)) == (0, 3)
    assert restore_of(actions).storages == names


def test_a_run_that_leaves_nothing_to_choose_records_nothing() -> None:
    machine = Driver(stages=3, storages=no_choice)
    machine.join("abc")
    actions = machine.all_placed()
    assert recorded(actions) == [] and all(isinstance(action, Send) for action in actions)
    assert restore_of(actions).storages == ()


def test_a_stage_needs_the_fewest_bits_until_they_are_chosen_and_then_what_was_chosen() -> None:
    devices = Devices(on_cpu=False)
    config = replace(run("autocast"), storage=StorageSection(allow=("8", "4")))
    allowed = allowed_storages(config)
    needs = [least_stage_bytes(chosen_config(config, one), 2, devices) for one in allowed]
    plain = least_stage_bytes(config, 2, devices)

    def bytes_with(*history: tuple[int, StoragePlan]) -> tuple[int, ...]:
        one = storage_control(config, 0, StepHistory(history), lambda stages, kind: plain)
        return tuple(one.stage_bytes(2, devices))

    assert bytes_with() == least_stage_bytes(narrowest(config), 2, devices)
    mixed = StoragePlan((name_of(allowed[0]), name_of(allowed[-1])))
    assert bytes_with((0, mixed)) == (needs[0][0], needs[-1][1])
    # One of other stages says nothing of these.
    assert bytes_with((0, StoragePlan((NARROW,)))) == bytes_with()
    nothing = storage_control(replace(config, storage=StorageSection()), 0, StepHistory(), lambda *_: (7,))
    assert nothing.stage_bytes(2, devices) == (7,)


def test_the_record_is_in_the_runs_database_and_damage_is_named(tmp_path: Path) -> None:
    with Store.create(tmp_path / "run", run_id="r", config_json="{}", pin=b"", now=0.0) as store:
        assert recorded_storages(store) == StepHistory()
        for step, names in ((0, (WIDE,)), (8, (NARROW,)), (5, (NARROW, WIDE))):
            record_plan(store, RecordPlan(step=step, plan=StoragePlan(names)))
        assert recorded_storages(store) == StepHistory(
            ((0, StoragePlan((WIDE,))), (5, StoragePlan((NARROW, WIDE))))
        )
        with store.writing() as db:
            db.execute("UPDATE decisions SET decision = '[' WHERE at = 5")
        with pytest.raises(UserError, match=r"damaged.*put back a copy"):
            recorded_storages(store)
