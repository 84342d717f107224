"""The tables in the documents agree with the program and the recorded results."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from scripts.docs import losses, memory, program, tables
from scripts.report import markdown

ROOT = Path(__file__).resolve().parents[4]


def run(forward: str, backward: str, seed: int, loss: float, held_out: float) -> dict[str, Any]:
    return {
        "width": 128,
        "forward_codec": forward,
        "backward_codec": backward,
        "seed": seed,
        "loss_last": loss,
        "loss_held_out": held_out,
        "bits_forward": 32.0 if forward == "fp32" else 4.44,
        "bits_backward": 32.0 if backward == "fp32" else 8.28,
    }


REPORT: dict[str, Any] = {
    "commit": "0123456789abcdef0123456789abcdef01234567 with changes",
    "hardware": "A  Processor, 2 cores",
    "versions": {"torch": "2.13.0", "python": "3.11.1"},
    "data": {"name": "text.txt"},
    "last_steps": 20,
    "held_out_windows": 8,
    "settings": {
        "run.steps": 300,
        "training.global_batch": 16,
        "model.sequence": 128,
        "model.layers": 4,
        "pipeline.stages": 4,
    },
    "runs": [
        run("tah", "fixed-8", 0, 2.02, 2.4),
        run("fp32", "fp32", 0, 2.0, 2.5),
        run("tah", "fixed-8", 1, 2.1, 2.6),
    ],
}


def test_the_documents_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert tables.main(["--check"]) == 0, capsys.readouterr().out


def test_the_readme_is_looked_at() -> None:
    assert ROOT / "README.md" in tables.documents()


def test_a_changed_table_is_found_and_rewritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = tmp_path / "README.md"
    stale = "before\n<!-- table:commands -->\nstale figures\n<!-- /table -->\nafter\n"
    readme.write_text(stale, encoding="utf-8")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    assert tables.main(["--check"]) == 1
    assert "README.md: out of date" in capsys.readouterr().out
    assert readme.read_text(encoding="utf-8") == stale
    assert tables.main([]) == 0
    written = readme.read_text(encoding="utf-8")
    assert "stale figures" not in written
    assert "| `thinwire join` |" in written
    assert written.startswith("before\n<!-- table:commands -->\n") and written.endswith(
        "<!-- /table -->\nafter\n"
    )
    assert tables.main(["--check"]) == 0


def test_a_table_that_nothing_makes_is_refused() -> None:
    with pytest.raises(SystemExit, match="no table is called 'speed'; known: a"):
        tables.with_tables("<!-- table:speed -->\n<!-- /table -->", {"a": lambda: ""})


def test_every_table_stands_in_a_document() -> None:
    marks = [name for path in tables.documents() for _, name, _ in tables.BLOCK.findall(path.read_text())]
    assert sorted(marks) == sorted(tables.TABLES)


def test_cells_cannot_break_a_row() -> None:
    made = markdown([("a", "left"), ("b", "right")], [["x|y", "1"]])
    assert made == "| a | b |\n|---|--:|\n| x\\|y | 1 |"


def test_a_fields_docstring_is_its_meaning() -> None:
    fields = ("x: int = 1", '"""Two', 'lines."""', "y: int = 2", "z: int = 3")
    source = "\n    ".join(("class A:", '"""Of A."""', *fields))
    assert program.field_words(source) == {"A": {"x": "Two lines."}}


def test_every_key_of_a_run_file_has_a_row() -> None:
    rows = program.run_file().splitlines()
    assert any(row.startswith("| `run.seed` | `0` |") for row in rows)
    assert any(row.startswith('| `pipeline.forward_codec` | `"tah"` |') for row in rows)


def test_losses_are_shown_beside_the_uncompressed_run_of_their_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "codec_loss.json"
    path.write_text(json.dumps(REPORT), encoding="utf-8")
    monkeypatch.setattr(losses, "CODEC_LOSSES", (path,))
    lines = losses.codec_loss().splitlines()
    assert lines[2:4] == [
        "| 128 | `fp32` | `fp32` | 32.00 | 32.00 | 2.0000 | 2.5000 | - | - |",
        "| 128 | `tah` | `fixed-8` | 4.44 | 8.28 | 2.0200 (+1.00 %) | 2.4000 (-4.00 %) | 2.1000 | 2.6000 |",
    ]
    assert "A Processor, 2 cores" in lines[-1] and "commit 0123456789ab with changes." in lines[-1]


def test_the_summary_of_storage_gives_the_range_over_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def row(way: str, shape: str, peak: float, seconds: float) -> dict[str, Any]:
        return {"way": way, "shape": shape, "tokens": 8192, "peak_bytes": peak, "seconds": seconds}

    rows = [row("bf16", "a", 100, 1.0), row("agoq", "a", 40, 0.99), row("bf16, cuDNN", "a", 100, 0.9)]
    rows += [row("bf16", "b", 200, 2.0), row("agoq", "b", 100, 2.03), row("bf16, cuDNN", "b", 200, 1.6)]
    path = tmp_path / "stored_activations.json"
    path.write_text(json.dumps({"rows": rows}), encoding="utf-8")
    monkeypatch.setattr(memory, "STORED_ACTIVATIONS", path)
    text = memory.inside_a_node()
    assert "50 to 60 % less peak memory" in text
    assert "-1.0 to +1.5 % time" in text and "10 to 20 % less)" in text


def test_gradients_are_shown_beside_the_papers_with_misses_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = {
        "norm": (0.05, 0.002),
        "weights behind a norm": (0.02, 0.01),
        "SwiGLU": (0.2, 0.1),
        "weights behind SwiGLU": (0.026, 0.01),
        "attention Q, attention again": (0.3, 0.2),
    }
    gradients = [
        {"gradient": name, "bits": bits, "normalised_l2": error}
        for name, both in errors.items()
        for bits, error in zip((4, 8), both, strict=True)
    ]
    model = {"family": "llama", "layers": 4, "hidden": 128, "sequence": 128}
    settings = {"model": model, "training": {"global_batch": 16}, "run.steps": 150}
    path = tmp_path / "stored_activations_loss.json"
    path.write_text(json.dumps({**REPORT, "settings": settings, "gradients": gradients}), encoding="utf-8")
    monkeypatch.setattr(memory, "STORED_LOSS", path)
    text = memory.stored_gradients()
    assert "| norm | 0.0500 | 0.0020 | 0.003 |" in text
    assert "| attention Q, attention again | 0.3000 | 0.2000 |  |" in text
    assert text.endswith("Here 4 bits do not reach it; the fewest that do: norm 8, SwiGLU none.")


def test_the_optimizers_table_says_where_others_are_better(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def row(way: str, time: float, state: float) -> dict[str, Any]:
        return {"way": way, "microseconds": time, "state_bytes_a_parameter": state}

    report = {
        **REPORT,
        "versions": dict.fromkeys(("torch", "triton", "torchao", "bitsandbytes"), "1.0"),
        "elements": 1024,
        "runs": 30,
        "train_steps": 60,
        "speed": [
            row("copy", 100, 0),
            row(memory.OURS, 1000, 2.05),
            row("torch.optim.AdamW, fused", 900, 8),
        ],
        "update_error": dict(zip(memory.UPDATE_ERRORS.values(), (0.02, 0.03, 0.01), strict=True)),
        "rivals": {
            "commit": "abc",
            "copy_microseconds": 90.0,
            "versions": {"torchao": "1.1", "bitsandbytes": "1.2"},
            "speed": [row("torchao AdamWFp8", 1100, 2.03), row("bitsandbytes AdamW8bit", 1900, 2.05)],
        },
    }
    path = tmp_path / "optimizer.json"
    path.write_text(json.dumps(report), encoding="utf-8")
    monkeypatch.setattr(memory, "OPTIMIZER", path)
    text = memory.optimizer()
    assert f"| {memory.OURS} | 1000 | 2.050 | 0.0200 |" in text
    assert "| torchao AdamWFp8 | 1100 | 2.030 | 0.0300 |" in text
    assert "torchao 1.1, bitsandbytes 1.2 at commit abc" in text
    assert "a copy took 90 microseconds, where it took 100 here" in text
    assert text.endswith(
        f"Others are better than `{memory.OURS}`: torch.optim.AdamW, fused in time (900 against 1000), "
        "torchao AdamWFp8 in state (2.030 against 2.050), bitsandbytes AdamW8bit in error of the update "
        "(0.0100 against 0.0200)."
    )


def test_links_in_the_documents_lead_somewhere() -> None:
    links = [
        (path, target)
        for path in tables.documents()
        for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text(encoding="utf-8"))
    ]
    assert links
    assert [str(target) for path, target in links if not (path.parent / target).exists()] == []
