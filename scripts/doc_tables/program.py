"""Tables of the program itself: keys, commands, metrics, sizes of codecs."""

import argparse
import ast
from collections.abc import Sequence
from math import prod
from pathlib import Path

import node.config.schema
import node.lab.profile
from node.cli.main import build_parser
from node.config.loader import section_types, toml_value
from node.lab.profile import LabSection, NetworkSection, SweepSection
from node.telemetry.metrics import NODE_METRICS, PREFIX, RUN_METRICS, Definition
from wire.codecs.forms import AqsgdForm, codec_names, form

from .markdown import Tables, markdown

SIZED_SHAPE = (4, 1024, 1024)


def run_file() -> str:
    """Every key of a run file, its default, and the words beneath it in the schema."""
    words = field_words(Path(node.config.schema.__file__).read_text(encoding="utf-8"))
    rows = [
        [f"`{section}.{key}`", f"`{toml_value(value)}`", words[kind.__name__].get(key, "")]
        for section, kind in section_types().items()
        for key, value in vars(kind()).items()
    ]
    return markdown([("key", "left"), ("default", "left"), ("meaning", "left")], rows)


def field_words(source: str) -> dict[str, dict[str, str]]:
    """For each class of a module, the docstring beneath each field, on one line."""
    found: dict[str, dict[str, str]] = {}
    for statement in ast.parse(source).body:
        if not isinstance(statement, ast.ClassDef):
            continue
        fields = found.setdefault(statement.name, {})
        for before, after in zip(statement.body, statement.body[1:], strict=False):
            if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name):
                match after:
                    case ast.Expr(value=ast.Constant(value=str() as text)):
                        fields[before.target.id] = " ".join(text.split())
    return found


def lab_profile() -> str:
    """Every key of a laboratory's profile, its default, and the words beneath it."""
    words = field_words(Path(node.lab.profile.__file__).read_text(encoding="utf-8"))
    sections = {"lab": LabSection, "network": NetworkSection, "sweep": SweepSection}
    rows = [
        [f"`{section}.{key}`", f"`{toml_value(value)}`", words[kind.__name__].get(key, "")]
        for section, kind in sections.items()
        for key, value in vars(kind()).items()
    ]
    return markdown([("key", "left"), ("default", "left"), ("meaning", "left")], rows)


def commands() -> str:
    """Every command with its help."""
    rows = []
    for action in build_parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            for choice in action._choices_actions:
                rows.append([f"`thinwire {choice.dest}`", choice.help or ""])
    return markdown([("command", "left"), ("does", "left")], rows)


def run_metrics() -> str:
    """Every metric that the coordinator shows."""
    return _metrics(RUN_METRICS)


def node_metrics() -> str:
    """Every metric that a node shows with `join --metrics`."""
    return _metrics(NODE_METRICS)


def _metrics(definitions: Sequence[Definition]) -> str:
    rows = [
        [
            f"`{PREFIX}{one.name}`",
            one.kind.value,
            ", ".join(f"`{label}`" for label in one.labels),
            one.meaning,
        ]
        for one in definitions
    ]
    return markdown([("metric", "left"), ("kind", "left"), ("labels", "left"), ("meaning", "left")], rows)


def codec_sizes() -> str:
    """True bits an element of every codec, header included, for a tensor of about four million elements."""
    rows = [[f"`{name}`", f"{_bits(form(name).packed_bytes(SIZED_SHAPE)):.3f}"] for name in codec_names()]
    for bits in (2, 4, 8):
        remembering = AqsgdForm(bits)
        always, first = remembering.packed_bytes(SIZED_SHAPE), remembering.first_pass_bytes(SIZED_SHAPE)
        size = f"{_bits(always):.3f}, in the first pass {_bits(first):.3f}"
        rows.append([f"`aqsgd-{bits}`", size])
    return markdown([("codec", "left"), ("bits an element", "right")], rows)


def _bits(packed_bytes: int) -> float:
    return 8 * packed_bytes / prod(SIZED_SHAPE)


TABLES: Tables = {
    "run_file": run_file,
    "lab_profile": lab_profile,
    "commands": commands,
    "run_metrics": run_metrics,
    "node_metrics": node_metrics,
    "codec_sizes": codec_sizes,
}
