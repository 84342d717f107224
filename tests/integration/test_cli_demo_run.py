"""`thinwire demo` through the real command: five processes, mutual TLS, the default codecs."""

import json
from pathlib import Path

import pytest

from node.telemetry.events import RunFinished, StepDone, from_json
from tests.support.memory_pipeline import TEXT
from tests.support.run_harness import Run

pytestmark = pytest.mark.timeout(240)

SMALLER = (
    *("model.layers=2", "model.hidden=64", "model.ffn=96", "model.sequence=32", "training.global_batch=4"),
    "pipeline.stages=2",
)


def with_torch(run: Run) -> dict[str, bool]:
    """Names of the commands whose processes have loaded torch's libraries."""
    found = {}
    for pid in run.survivors():
        words = Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8").split("\0")
        maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")
        found[words[words.index("node.cli.main") + 1]] = "libtorch" in maps
    return found


def test_the_demo(tmp_path: Path) -> None:
    """As a user runs it, on the standard library's sources; checks its text output."""
    with Run(tmp_path) as run:
        demo = run.command("demo", "--steps", "2", "--run-dir", str(run.run_dir))
        assert demo.wait_exit(180) == 0, demo.report()
        assert demo.stderr == ""
        shown = "\n".join(demo.lines)
        assert "step 2/2" in shown
        assert "all steps are done" in shown
        run.assert_quiet()
        (snapshot,) = (run.run_dir / "snapshots").iterdir()
        assert snapshot.name == "step-00000002"
        assert len(json.loads((snapshot / "manifest.json").read_bytes())["units"]) == 6


def test_ctrl_c_ends_the_demo_on_the_users_text_and_all_of_its_processes(tmp_path: Path) -> None:
    """A folder of texts. The snapshot of the step that was running is kept, so the run can go on."""
    library = tmp_path / "library"
    (library / "shelf").mkdir(parents=True)
    (library / "shelf" / "words.md").write_bytes(TEXT)
    (library / "cover.png").write_bytes(bytes(range(256)))
    with Run(tmp_path) as run:
        demo = run.command(
            *("demo", "--json", "--data", str(library), "--run-dir", str(run.run_dir)),
            # Enough steps that even a late Ctrl-C comes before the end and before the first snapshot.
            *("run.steps=100000", "run.snapshot_every=100000"),
            *SMALLER,
        )
        # Five processes start with all imports and may compile codecs.
        demo.wait_line(lambda line: '"event": "step"' in line, 180)
        # In a run that trains: a small machine is enough for a coordinator.
        assert with_torch(run) == {"demo": False, "coordinator": False, "join": True}
        demo.interrupt()
        assert demo.wait_exit() == 130
        assert demo.stderr == "thinwire: interrupted\n"
        run.assert_quiet()
        events = [from_json(line) for line in demo.lines]
        end = events[-1]
        assert isinstance(end, RunFinished) and end.reason == "stopped by the operator"
        assert end.summary is not None
        assert 4 < end.summary.bits_forward < 5
        assert 8 < end.summary.bits_backward < 9
        steps = [event.step for event in events if isinstance(event, StepDone)]
        (snapshot,) = (run.run_dir / "snapshots").iterdir()
        assert snapshot.name == f"step-{steps[-1]:08d}"
