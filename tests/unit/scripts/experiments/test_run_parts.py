from pathlib import Path
from typing import Any

import torch

from scripts.experiments.run_parts import Checkpoints, Parts

KEY = ("codec", "seed")


def header(**others: Any) -> dict[str, Any]:
    return {
        "experiment": "one",
        "steps": 8,
        "commit": "a",
        "hardware": "here",
        "versions": {},
        "runs": [],
        **others,
    }


def run(codec: str, seed: int, loss: float) -> dict[str, Any]:
    return {"codec": codec, "seed": seed, "loss": loss}


def test_finished_runs_are_merged_by_their_key(tmp_path: Path) -> None:
    there = Parts(tmp_path, lambda: header(commit="b", hardware="a GPU"))
    there.put("fp32-0", run("fp32", 0, 2.0))
    there.put("bf16-0", run("bf16", 0, 3.0))
    assert there.has("fp32-0") and not there.has("fp32-1")
    earlier = header(runs=[run("fp32", 0, 1.0), run("fp32", 1, 1.5)])
    merged = Parts(tmp_path, None).merged(earlier, KEY)
    assert merged is not None
    assert merged["runs"] == [run("fp32", 0, 2.0), run("fp32", 1, 1.5), run("bf16", 0, 3.0)]
    assert (merged["steps"], merged["hardware"]) == (8, "a GPU")
    assert Parts(tmp_path, None).merged(None, KEY) == {
        **header(commit="b", hardware="a GPU"),
        "runs": [run("bf16", 0, 3.0), run("fp32", 0, 2.0)],
    }


def test_runs_of_other_settings_are_left_out(tmp_path: Path) -> None:
    Parts(tmp_path, lambda: header(steps=9)).put("fp32-0", run("fp32", 0, 2.0))
    merged = Parts(tmp_path, header).merged(header(steps=7, runs=[run("fp32", 1, 1.0)]), KEY)
    assert merged is not None and merged["runs"] == []
    assert Parts(tmp_path / "none", None).merged(None, KEY) is None


def test_a_checkpoint_gives_back_what_it_was_given(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path / "kept")
    assert kept.load("one") is None
    for number in range(2):
        states = {
            "embed": {"a": torch.tensor([1.0 + number]), "step": torch.tensor(3)},
            "head": {"b": torch.ones(2)},
        }
        kept.save("one", states, {"step": number})
        found = kept.load("one")
        assert found is not None and found[1] == {"step": number}
        assert list(found[0]) == ["embed", "head"]
        for unit, state in states.items():
            assert state.keys() == found[0][unit].keys()
            assert all(torch.equal(state[name], found[0][unit][name]) for name in state)
    kept.drop("one")
    assert not kept.has("one") and kept.load("one") is None
    nowhere = Checkpoints(None)
    nowhere.save("one", {}, {})
    assert not nowhere.has("one")
