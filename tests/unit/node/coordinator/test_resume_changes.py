"""Settings that may change when a run is resumed: those that messages tell operators to change."""

from pathlib import Path

import pytest

from node.cli.resume import CHANGEABLE
from node.config.schema import RunConfig
from node.run_file.loader import change_config, default_config, from_json, to_json, with_absolute_paths
from node.run_state.epoch import Assignment, Epoch, OnRecord, StepRules
from node.run_state.failures import Failures
from node.run_state.votes import VoteHistory
from wire.errors import ConfigError


@pytest.mark.parametrize("override", ["training.beta1=0.8", "training.global_batch=32", "run.seed=3"])
def test_settings_that_state_and_batches_depend_on_cannot_change(override: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot change .*training\.lr"):
        change_config(RunConfig(), [override], CHANGEABLE)


def test_what_a_service_says_again_at_each_start_is_no_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("some text")
    (tmp_path / "words.json").write_text("{}")
    said = ["run.steps=500", "training.beta1=0.8", "data.path=text.txt", "data.tokenizer=words.json"]
    config = from_json(to_json(with_absolute_paths(default_config([*said, "model.vocab=300"]))))
    assert change_config(config, [*said, "training.lr=0.0005"], CHANGEABLE).training.lr == 0.0005
    with pytest.raises(ConfigError, match=r"training\.beta1 cannot change once"):
        change_config(config, [*said, "training.beta1=0.7"], CHANGEABLE)


def test_a_diverged_run_can_follow_its_own_advice() -> None:
    rules = StepRules(
        plan=lambda step, norm: (1.0, 1e-3),
        neighbours=lambda _stage, _stages: (),
        history=VoteHistory(lambda _stages: [frozenset()]),
    )
    epoch = Epoch(1, Assignment(hosts=("a",), addresses=("a:1",)), OnRecord(), rules)
    epoch.uncompressed = True
    remedy = getattr(Failures().not_finite(epoch, "a", "the loss"), "remedy", "")
    key = remedy.removeprefix("lower ").partition(",")[0]
    assert key in CHANGEABLE, remedy
