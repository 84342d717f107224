"""`thinwire demo` through the real command: four processes, mutual TLS, the default codecs."""

import json
from pathlib import Path

import pytest

from node.telemetry.events import RunFinished, StepDone, from_json
from tests.support.memory_pipeline import TEXT
from tests.support.run_harness import Run

pytestmark = pytest.mark.timeout(240)


def with_torch(run: Run) -> dict[str, bool]:
    """Names of the commands whose processes have loaded torch's libraries."""
    found = {}
    for pid in run.survivors():
        words = Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8").split("\0")
        maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")
        found[words[words.index("node.cli.main") + 1]] = "libtorch" in maps
    return found


def test_ctrl_c_ends_the_demo_on_the_users_text_and_all_of_its_processes(tmp_path: Path) -> None:
    """The installed recipe on two stages, on a folder of texts. The snapshot of the step that was running is
    kept, so the run can go on. `test_deploy_commands.py` runs a demo to its end."""
    library = tmp_path / "library"
    (library / "shelf").mkdir(parents=True)
    (library / "shelf" / "words.md").write_bytes(TEXT)
    (library / "cover.png").write_bytes(bytes(range(256)))
    with Run(tmp_path) as run:
        demo = run.command(
            *("demo", "--json", "--data", str(library), "--run-dir", str(run.run_dir)),
            # Enough steps that even a late Ctrl-C comes before the end and before the first snapshot.
            *("run.steps=100000", "run.snapshot_every=100000", "pipeline.stages=2"),
        )
        # Four processes start with all imports and may compile codecs.
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
        assert len(json.loads((snapshot / "manifest.json").read_bytes())["units"]) == 6
