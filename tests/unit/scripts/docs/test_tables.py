"""The tables in the documents agree with the program and the recorded results."""

import re

import pytest

from scripts.docs import tables


def test_the_documents_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    """Every table is made from the program and the recorded results; `--check` compares all."""
    assert tables.main(["--check"]) == 0, capsys.readouterr().out


def test_links_in_the_documents_lead_somewhere() -> None:
    links = [
        (path, target)
        for path in tables.documents()
        for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text(encoding="utf-8"))
    ]
    assert links
    assert [str(target) for path, target in links if not (path.parent / target).exists()] == []
