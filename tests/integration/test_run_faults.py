"""Nodes die in runs that fault tests elsewhere do not have: losses and weights keep their bits."""

from dataclasses import replace
from pathlib import Path

import pytest

from node.schedule.placement import head_first
from tests.support.fault_prefork import Prefork
from tests.support.fault_run import FaultRun, small
from tests.support.faults import Fault, Kind, Phase

pytestmark = pytest.mark.timeout(240)


def test_a_tied_model_with_its_head_on_the_first_stage_survives_a_death(
    prefork: Prefork, tmp_path: Path
) -> None:
    """By codecs, with a held-out loss; the choice is on record, so that a replay has the same bits."""
    config = small(codecs=("tah", "fixed-8"))
    config = replace(
        config,
        model=replace(config.model, tied=True),
        pipeline=replace(config.pipeline, head="first", window="auto"),
        data=replace(config.data, valid_every=3, valid_samples=8),
    )
    assert head_first(config, 3)
    kill = Fault(kind=Kind.KILL, phase=Phase.BACKWARD, stage=0, step=3)
    with FaultRun(tmp_path, config, [kill], launch=prefork.popen) as run:
        run.start()
        run.add_nodes(3)
        run.assert_ends_undisturbed()
        assert 'head = "first"' in (run.run_dir / "run.toml").read_text(encoding="utf-8")


def test_samples_in_slices_survive_a_death_in_the_middle_of_one(prefork: Prefork, tmp_path: Path) -> None:
    """A node dies in a backward, with keys, values and gradients of half a sample; the run goes on with two
    stages, and measures a held-out loss."""
    config = small(min_stages=2)
    config = replace(
        config,
        training=replace(config.training, global_batch=4),
        pipeline=replace(config.pipeline, sequence_chunks=3, window="auto"),
        data=replace(config.data, valid_every=3, valid_samples=4),
    )
    with FaultRun(
        tmp_path,
        config,
        [Fault(kind=Kind.KILL, phase=Phase.BACKWARD, stage=1, step=3)],
        launch=prefork.popen,
    ) as run:
        run.start()
        run.add_nodes(3)
        run.assert_ends_undisturbed(restart=False)
