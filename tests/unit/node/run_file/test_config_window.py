"""`pipeline.window` as a number or `auto`, and the memory that a wider window may take."""

from dataclasses import replace
from pathlib import Path

import pytest

from node.config.schema import ModelSection, PipelineSection, RunConfig, TrainingSection
from node.run_file.loader import default_config, from_json, load_config, to_json, to_toml
from node.schedule.schedule import held_activations, schedule
from node.tuning.device_memory import Devices
from node.tuning.memory import most_held, stage_bytes
from wire.errors import ConfigError

GB = 10**9
CONFIG = RunConfig(
    model=ModelSection(layers=8, hidden=256, sequence=512),
    training=TrainingSection(global_batch=32, microbatch=1),
    pipeline=PipelineSection(stages=4),
)


def load(tmp_path: Path, text: str, *overrides: str) -> RunConfig:
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    return load_config(path, overrides)


def test_auto_is_the_default_of_a_run_file() -> None:
    assert default_config().pipeline.window == "auto"
    assert default_config().pipeline.first_window == 0


@pytest.mark.parametrize("window", ["auto", 0, 7])
def test_both_forms_survive_every_way_in_and_out(tmp_path: Path, window: int | str) -> None:
    written = f'"{window}"' if window == "auto" else window
    config = load(tmp_path, f"[pipeline]\nwindow = {written}\n")
    assert config.pipeline.window == window
    assert load(tmp_path, "", f"pipeline.window={window}") == config
    assert from_json(to_json(config)) == config
    assert load(tmp_path, to_toml(config)) == config
    assert config.pipeline.first_window == (0 if window == "auto" else window)


@pytest.mark.parametrize("wrong", ['"wide"', "1.5", "true", "[1]"])
def test_anything_else_is_refused(tmp_path: Path, wrong: str) -> None:
    with pytest.raises(ConfigError, match=r'pipeline\.window must be a whole number or "auto"'):
        load(tmp_path, f"[pipeline]\nwindow = {wrong}\n")
    with pytest.raises(ConfigError, match=r'pipeline\.window must be a whole number or "auto"'):
        load(tmp_path, "", f"pipeline.window={wrong}")


def test_negative_amounts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pipeline\.window must be at least 0, got -1"):
        load(tmp_path, "[pipeline]\nwindow = -1\n")
    with pytest.raises(ConfigError, match=r"pipeline\.window_gb must be a finite number of at least 0"):
        load(tmp_path, "[pipeline]\nwindow_gb = -0.5\n")


@pytest.mark.parametrize("devices", [Devices(), Devices(on_cpu=False)], ids=["CPU", "GPU with graphs"])
def test_held_activations_fit_the_estimate(devices: Devices) -> None:
    """As many as fit and not one more: the estimate of a schedule that holds them says so."""
    stages, memory = 4, (3 * GB // 2 if devices.on_cpu else GB)
    most = most_held(CONFIG, stages, [memory] * stages, devices=[devices] * stages)
    assert 4 < most[0] < 32
    for stage in range(stages - 1):
        for window in range(33):
            pipeline = replace(CONFIG.pipeline, window=window)
            held = held_activations(schedule(stages, 1, CONFIG.microbatches, window)[stage])
            need = stage_bytes(replace(CONFIG, pipeline=pipeline), stages, devices)[stage]
            assert (held <= most[stage]) == (need <= 0.8 * memory)


def test_the_last_stage_holds_one_whatever_the_window() -> None:
    assert most_held(CONFIG, 4, [2 * GB] * 4)[3] == 1


def test_without_memory_to_spare_window_zero_is_left() -> None:
    least = tuple(held_activations(order) for order in schedule(4, 1, CONFIG.microbatches, 0))
    assert most_held(CONFIG, 4, [0, 0, 0, 0]) == least


def test_the_run_file_may_allow_less_than_nodes_have() -> None:
    wide = most_held(CONFIG, 4, [64 * GB] * 4)
    bounded = replace(CONFIG, pipeline=replace(CONFIG.pipeline, window_gb=0.2))
    narrow = most_held(bounded, 4, [64 * GB] * 4)
    assert 4 < narrow[0] < wide[0]
