"""Laboratory profiles: accepted values, error messages, and the cells they define."""

from pathlib import Path

import pytest

from node.lab.plan import SPARE_STEPS, CellKey, plan_runs, planned_steps
from node.lab.profile import load_profile
from node.lab.shape import read_matrix
from node.schedule.routing import link_ends
from wire.errors import ConfigError

LAB = Path(__file__).parents[4] / "deploy" / "lab"
MATRIX = LAB / "ten-regions.toml"
PROFILES = sorted(path for path in LAB.glob("*.toml") if path.name not in (MATRIX.name, "nat.toml"))
SMALL = """
[pipeline]
stages = 3
[[sweep]]
rates = ["100", "50/10"]
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "profile.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_every_profile_we_ship_is_whole(path: Path) -> None:
    profile = load_profile(path)
    assert profile.lab.name == path.stem
    for run in plan_runs(profile):
        shared = profile.network.topology == "interfaces"
        wires = run.config.pipeline.stages if shared else len(link_ends(run.config))
        for shape in run.shapes:
            assert len(shape.links) == wires


def test_the_matrix_we_ship_has_every_pair_of_ten_regions() -> None:
    matrix = read_matrix(MATRIX)
    assert len(matrix.regions) == 10
    assert len(matrix.pairs) == 45
    assert matrix.pairs[frozenset(("Sydney", "London"))] == (326.0, 262.0)
    shape = matrix.shape(["Oregon", "Virginia", "Ohio"], [(0, 1), (1, 2), (2, 0)], 0.1)
    assert [(link.up_mbit, link.rtt_ms) for link in shape.links] == [
        (79.0, 67.0),
        (112.0, 11.0),
        (110.0, 49.0),
    ]


def test_rates_may_differ_by_direction(tmp_path: Path) -> None:
    even, uneven = load_profile(write(tmp_path, SMALL)).sweeps[0].shapes
    assert [(link.up_mbit, link.down_mbit) for link in even.links] == [(100.0, 100.0)] * 2
    assert [(link.up_mbit, link.down_mbit) for link in uneven.links] == [(50.0, 10.0)] * 2
    assert (uneven.label, uneven.busiest_mbit) == ("50/10", 10.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[lab]\nstep = 3" + SMALL, "unknown key 'step' in [lab]; did you mean 'steps'?"),
        ("[network]\ndelay = 'netme'" + SMALL, "network.delay 'netme' is unknown; did you mean 'netem'?"),
        (
            "[network]\nsocket_buffer_mb = 0.0" + SMALL,
            "network.socket_buffer_mb must be above 0 and at most 1000",
        ),
        ("[lab]\nwarmup_steps = 0" + SMALL, "lab.warmup_steps must be at least 1, got 0"),
        ("[run]\nseed = 3" + SMALL, "run.seed is set by the lab itself"),
        ("[pipeline]\nstages = 3", "give at least one [[sweep]]"),
        ("[pipeline]\nstages = 1\n[[sweep]]\nrates = ['1']", "a single stage has no link"),
        ("[[sweep]]\nrates = ['fast']", "rate 'fast' with 0 ms: a rate is"),
        ("[[sweep]]\nrates = ['0']", "rate '0' with 0 ms: a rate is"),
        ("[[sweep]]\nrates = ['nan']", "rate 'nan' with 0 ms: a rate is"),
        ("[[sweep]]\nrates = ['10']\ndelays_ms = [-1]", "with -1 ms"),
        ("[[sweep]]\ncodecs = ['fp32/fp32']", "needs rates"),
        ("[[sweep]]\nrates = ['10']\ncodecs = ['tah']", "codec pair 'tah' must be"),
        ("[[sweep]]\nrates = ['10']\ncodecs = ['tahh/fp32']", "pipeline.forward_codec"),
        ("[[sweep]]\nrates = ['10']\nwindows = ['wide']", "window 'wide' must be"),
        ("[[sweep]]\nrates = ['10']\nmicrobatches = [5]", "must be a multiple of training.microbatch"),
        ("[[sweep]]\nrates = ['10']\nsteps = -1", "steps cannot be negative, got -1"),
        ("[[sweep]]\nrates = ['10']\nmatrix_shares = [1.0]", "matrix_shares go with network.matrix"),
        ("[network]\nregions = ['Oregon']" + SMALL, "network.matrix and network.regions need each other"),
        ("[model", "is not valid TOML"),
    ],
)
def test_mistakes_are_reported_in_one_line(tmp_path: Path, text: str, words: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_profile(path)
    message = str(caught.value)
    assert words in message
    assert message.startswith(str(path))
    assert "\n" not in message


def test_a_region_that_the_matrix_lacks_gets_its_neighbours_name(tmp_path: Path) -> None:
    text = f"[pipeline]\nstages = 2\n[network]\nmatrix = '{MATRIX}'\nregions = ['Oregon', 'Viginia']\n"
    with pytest.raises(ConfigError, match=r"did you mean 'Virginia'"):
        load_profile(write(tmp_path, text + "[[sweep]]\nmatrix_shares = [1.0]"))


def test_overrides_replace_values_of_the_lab_and_of_the_run(tmp_path: Path) -> None:
    path = write(tmp_path, SMALL)
    profile = load_profile(path, ["lab.steps=9", "data.path=some/text.txt", "network.topology=interfaces"])
    assert (profile.lab.steps, profile.network.topology) == (9, "interfaces")
    assert profile.config.data.path == "some/text.txt"
    assert profile.sha256 != load_profile(path).sha256
    with pytest.raises(ConfigError, match=r"unknown key 'stepz'"):
        load_profile(path, ["lab.stepz=9"])
    with pytest.raises(ConfigError, match=r"expected section.key=value"):
        load_profile(path, ["steps"])


def test_results_of_another_profile_are_recognised(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text("[model]\nhidden = 64\nheads = 4\nkv_heads = 4")
    path = write(tmp_path, "[lab]\nbase = 'base.toml'" + SMALL)
    before = load_profile(path)
    assert before.config.model.hidden == 64
    (tmp_path / "base.toml").write_text("[model]\nhidden = 128\nheads = 4\nkv_heads = 4")
    assert load_profile(path).sha256 != before.sha256


def test_cells_that_differ_in_their_links_alone_share_a_run(tmp_path: Path) -> None:
    text = SMALL + "codecs = ['fp32/fp32', 'tah/fixed-6']\nmicrobatches = [1, 2]\n"
    again = "[[sweep]]\nrates = ['100', '30']\ncodecs = ['fp32/fp32']\nmicrobatches = [1]\n"
    profile = load_profile(write(tmp_path, "[lab]\nseeds = [3]\n" + text + again))
    runs = plan_runs(profile)
    told = [(r.config.pipeline.forward_codec, r.config.training.microbatch, len(r.cells)) for r in runs]
    # The last sweep adds one cell; its other one has been planned already.
    assert told == [("fp32", 1, 2), ("tah", 1, 2), ("fp32", 2, 2), ("tah", 2, 2), ("fp32", 1, 1)]
    assert {run.config.run.seed for run in runs} == {3}
    for run in runs:
        # The run would make its snapshot in a step that the lab never lets happen.
        assert run.config.run.steps == planned_steps(profile, run.cells) + run.spare_steps + 1
        assert run.config.run.snapshot_every == run.config.run.steps


def test_cells_that_are_done_are_not_planned_again(tmp_path: Path) -> None:
    profile = load_profile(write(tmp_path, SMALL))
    everything = plan_runs(profile)
    first = everything[0].cells[0].key
    rest = plan_runs(profile, {first})
    assert [cell.key for cell in rest[0].cells] == [cell.key for cell in everything[0].cells[1:]]
    done: set[CellKey] = {cell.key for run in everything for cell in run.cells}
    assert plan_runs(profile, done) == ()


def test_a_sweep_may_measure_fewer_steps_than_the_others(tmp_path: Path) -> None:
    text = "[lab]\nsteps = 7\nwarmup_steps = 2\nunthrottled_steps = 3\n[pipeline]\nstages = 2\n"
    text += "[[sweep]]\nrates = ['10', '20']\ncodecs = ['fp32/fp32']\nsteps = 4\n"
    text += "[[sweep]]\nrates = ['30']\ncodecs = ['fp32/fp32']\n"
    first, last = plan_runs(load_profile(write(tmp_path, text)))
    assert [cell.steps for cell in (*first.cells, *last.cells)] == [4, 4, 7]
    assert first.config.run.steps == (2 + 3) + 2 * (2 + 4) + 3 * SPARE_STEPS + 1
    assert last.config.run.steps == (2 + 3) + (2 + 7) + 2 * SPARE_STEPS + 1
    alone = text.replace("unthrottled_steps = 3", "unthrottled_steps = 0")
    _, last = plan_runs(load_profile(write(tmp_path, alone)))
    assert (last.spare_steps, last.config.run.steps) == (0, (2 + 7) + 1)


@pytest.mark.parametrize(
    ("only", "cells"),
    [
        (["tah/fixed-6"], [("tah", "100"), ("tah", "50/10")]),
        (["@100"], [("fp32", "100"), ("tah", "100")]),
        (["tah/fixed-6@50/10"], [("tah", "50/10")]),
        (["tah/fixed-6@50/10", "fp32/fp32@100"], [("fp32", "100"), ("tah", "50/10")]),
    ],
)
def test_a_call_can_measure_some_of_the_cells(
    tmp_path: Path, only: list[str], cells: list[tuple[str, str]]
) -> None:
    runs = plan_runs(load_profile(write(tmp_path, SMALL)), only=only)
    assert [(cell.key.forward_codec, cell.key.shape) for run in runs for cell in run.cells] == cells


@pytest.mark.parametrize("words", ["tah", "tah/fixed-8", "@10", "tah/fixed-6@10", "fp32/fp32@", "@", ""])
def test_cells_that_the_profile_lacks_are_named(tmp_path: Path, words: str) -> None:
    profile = load_profile(write(tmp_path, SMALL))
    with pytest.raises(ConfigError, match=r"fp32/fp32, tah/fixed-6 .* 100"):
        plan_runs(profile, only=["tah/fixed-6", words])
