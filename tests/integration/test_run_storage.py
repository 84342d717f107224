"""A run whose file allows several storages: by the nodes' memory, on record, and the same after a resume."""

from dataclasses import replace
from pathlib import Path

import pytest

from node.config.schema import StorageSection
from node.coordinator.decisions import recorded_storages
from node.coordinator.store import Store
from node.telemetry.events import StoragesPlanned
from node.tuning.device_memory import Devices
from node.tuning.storage_choice import allowed_storages, kept_bytes, words_of_name
from tests.support.fault_prefork import Prefork
from tests.support.memory_pipeline import MemoryPipeline
from tests.support.run_harness import SMALL, Run, Still

WIDE, NARROW = "none/none/none/none", "none/8/none/none"
CONFIG = replace(
    SMALL,
    run=replace(SMALL.run, steps=12),
    storage=StorageSection(allow=("ffn_input:8",)),
    pipeline=replace(SMALL.pipeline, stages=2, window=0),
)

pytestmark = pytest.mark.timeout(240)


def test_stages_store_by_their_nodes_memory_and_go_on_so_with_other_nodes(
    tmp_path: Path, prefork: Prefork
) -> None:
    wide, narrow = (kept_bytes(CONFIG, storage, 2, Devices()) for storage in allowed_storages(CONFIG))
    # Enough to keep everything of the second stage as computed, and of the first one in 8 bits.
    room = (max(narrow[0], wide[1]) + wide[0]) // 2
    assert max(narrow[0], wide[1]) < room < wide[0]
    small = ("--max-memory", f"{room / 1e9:.7f}")
    with Run(tmp_path, CONFIG, launch=prefork.popen, still=Still(stage=0, steps=2)) as run:
        first = run.start()
        nodes = [run.add_node(options=small) for _ in range(2)]
        still = run.wait_still()
        first.interrupt()
        still.go_on()
        assert first.wait_exit() == 130
        for node in nodes:
            node.wait_exit()
        with Store.open(run.run_dir) as store:
            ((step, chosen),) = recorded_storages(store).changes
        # Whether packing or computing again is faster on the first stage is measured.
        assert step == 0 and chosen.names in ((NARROW, WIDE), (WIDE, WIDE))
        words = [words_of_name(name) for name in chosen.names]
        (said,) = first.all(StoragesPlanned)
        assert said.storages == chosen.names
        assert f"stage 0: {words[0]}; stage 1: {words[1]}" in said.text

        # These have all the machine's memory.
        second = run.resume()
        others = run.add_nodes(2)
        assert second.wait_exit() == 0
        run.assert_quiet()
        assert second.all(StoragesPlanned) == []
        with Store.open(run.run_dir) as store:
            assert recorded_storages(store).changes == ((0, chosen),)
        told = "this stage stores activations as the coordinator chose: "
        lines = [line for node in others for line in node.lines if told in line]
        assert len(lines) == 2, [node.report() for node in others]
        assert sorted(words) == sorted(line.partition(told)[2].split('"')[0] for line in lines)

        with MemoryPipeline(CONFIG) as stages:
            for executor in stages.executors:
                executor.use_storages(chosen.names)
                executor.restore(0, lambda unit: {})
            losses = [step.loss for step in stages.train(CONFIG.run.steps)]
            weights = stages.weights_sha256()
        assert run.losses == dict(enumerate(losses, start=1))
        assert second.summary.weights_sha256 == run.weights_sha256 == weights
