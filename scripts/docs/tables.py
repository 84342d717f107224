"""Write the generated tables into the documents: `python -m scripts.docs.tables`; `--check` only compares.

A document holds a table between `<!-- table:NAME -->` and `<!-- /table -->`. Modules beside this one make
the tables, from the program (run file keys, commands, codec sizes) or from scripts/results.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.docs import (
    codecs,
    fine_tuning,
    losses,
    network,
    optimizers,
    passes,
    program,
    rows,
    small_cards,
    summary,
)
from scripts.docs.markdown import Tables
from scripts.report import ROOT

FOLDERS = ("kernels", "wire", "node", "deploy", "scripts", "tests")
BLOCK = re.compile(r"(<!-- table:([a-z_]+) -->\n).*?(<!-- /table -->)", re.DOTALL)
SUBJECTS = (
    program,
    summary,
    codecs,
    fine_tuning,
    losses,
    network,
    optimizers,
    passes,
    rows,
    small_cards,
)
TABLES: Tables = {name: make for subject in SUBJECTS for name, make in subject.TABLES.items()}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the generated tables into the documents.")
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a table is out of date")
    check = parser.parse_args(argv).check
    outdated = []
    for path in documents():
        before = path.read_text(encoding="utf-8")
        after = with_tables(before, TABLES)
        if after == before:
            continue
        outdated.append(path.relative_to(ROOT))
        if not check:
            path.write_text(after, encoding="utf-8")
    for document in outdated:
        print(f"{document}: {'out of date: run python -m scripts.docs.tables' if check else 'written'}")
    return 1 if check and outdated else 0


def documents() -> list[Path]:
    """Every Markdown page of the project."""
    pages = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.md"))]
    return [*sorted(ROOT.glob("*.md")), *pages]


def with_tables(text: str, tables: Tables) -> str:
    """`text` with every marked block made again. Raises SystemExit for an unknown table."""

    def fill(found: re.Match[str]) -> str:
        if found[2] not in tables:
            raise SystemExit(f"no table is called {found[2]!r}; known: {', '.join(tables)}")
        return f"{found[1]}{tables[found[2]]()}\n{found[3]}"

    return BLOCK.sub(fill, text)


if __name__ == "__main__":
    sys.exit(main())
