"""The tables in the documents agree with the program and the recorded results."""

import re
from pathlib import Path

import pytest

from scripts.docs import markdown as markdown_of
from scripts.docs import tables

ROOT = Path(__file__).resolve().parents[4]


def test_the_documents_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    """Every table is made from the program and the recorded results; `--check` compares all."""
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


def test_links_in_the_documents_lead_somewhere() -> None:
    links = [
        (path, target)
        for path in tables.documents()
        for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text(encoding="utf-8"))
    ]
    assert links
    assert [str(target) for path, target in links if not (path.parent / target).exists()] == []


def test_the_pictures_are_of_the_recorded_runs() -> None:
    pytest.importorskip("matplotlib")
    from scripts.docs import losses, plot_convergence, plot_memory

    runs = markdown_of.read_report(losses.CONVERGENCE)["runs"]
    report = markdown_of.read_report(plot_memory.MEMORY_PLAN)
    again = "draw it again: python -m scripts.docs.plot_"
    drawn = plot_convergence.OUT.read_text(encoding="utf-8")
    assert plot_convergence.description(runs) in drawn, f"{again}convergence"
    assert plot_memory.description(report) in plot_memory.OUT.read_text(encoding="utf-8"), f"{again}memory"
