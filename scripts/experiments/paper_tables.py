"""The TAH-Quant paper's throughput beside the lab's results: its tables 3, 5 and 6.

    python -m scripts.experiments.paper_tables RESULTS...

Our machines differ from the paper's, so only ratios between codecs on one machine and one network compare;
each stands beside the paper's ratio.
"""

import argparse
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from node.lab.results import read_results
from node.lab.table import (
    Cells,
    Table,
    codec_pair,
    grouped,
    rate_text,
    share_text,
    table_text,
    tokens,
    unthrottled_text,
)


@dataclass(frozen=True, kw_only=True)
class PaperTable:
    """One of the paper's tables."""

    number: int
    place: str
    what: str
    columns: tuple[str, ...]
    """Codec pairs."""
    rows: tuple[Mapping[str, Any], ...]
    """`mbit`, `microbatch`, `tokens_per_second` by column."""

    def tokens(self, row: Mapping[str, Any], codecs: str) -> float | None:
        values = dict(zip(self.columns, row["tokens_per_second"], strict=True))
        return values.get(codecs)


def paper_tables() -> tuple[PaperTable, ...]:
    """The paper's tables 3, 5 and 6."""
    text = Path(__file__).with_name("paper_tables.toml").read_text(encoding="utf-8")
    return tuple(
        PaperTable(
            number=entry["number"],
            place=entry["place"],
            what=entry["what"],
            columns=tuple(entry["columns"]),
            rows=tuple(entry["rows"]),
        )
        for entry in tomllib.loads(text)["table"]
    )


def tables_beside(result: Mapping[str, Any]) -> list[Table]:
    """Each of the paper's tables beside the cells with the same settings."""
    return [paper_table(paper, result["cells"]) for paper in paper_tables()]


def paper_table(paper: PaperTable, cells: Cells) -> Table:
    """The paper's rows beside the cells measured without delay, at the same rate both ways and with the
    window `auto`."""
    rows = []
    for row in paper.rows:
        ours = {
            codec_pair(group[0]["key"]): group
            for group in grouped(cells)
            if group[0]["key"]["shape"] == f"{row['mbit']}"
            and group[0]["key"]["microbatch"] == row["microbatch"]
            and group[0]["key"]["window"] == "auto"
        }
        paper_base = paper.tokens(row, "fp32/fp32")
        base = ours.get("fp32/fp32")
        for pair in dict.fromkeys((*paper.columns, *ours)):
            theirs, group = paper.tokens(row, pair), ours.get(pair)
            rows.append(
                (
                    f"{row['mbit']}",
                    f"{row['microbatch']}",
                    pair,
                    f"{theirs}" if theirs else "-",
                    f"{theirs / paper_base:.2f}" if theirs and paper_base else "-",
                    rate_text(group) if group else "-",
                    f"{tokens(group) / tokens(base):.2f}" if group and base else "-",
                    share_text(group) if group else "-",
                    unthrottled_text(group) if group else "-",
                )
            )
    headings = (
        "Mbit/s",
        "microbatch",
        "codecs",
        "paper, tokens/s",
        "paper / fp32",
        "here, tokens/s",
        "here / fp32",
    )
    return Table(
        title=f"table {paper.number} of the paper ({paper.place}): {paper.what}",
        headings=(*headings, "of the floor", "of unthrottled"),
        rows=tuple(rows),
        left=3,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", metavar="RESULTS", nargs="+", type=Path, help="what `lab run` wrote")
    for path in parser.parse_args().results:
        for table in tables_beside(read_results(path)):
            sys.stdout.write(f"{table_text(str(path), table)}\n\n")


if __name__ == "__main__":
    main()
