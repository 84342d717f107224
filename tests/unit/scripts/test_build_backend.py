"""Wheels and source distributions."""

import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from scripts.build_backend import PACKAGES, moved

ROOT = Path(__file__).resolve().parents[3]
MODULES = ("node", "node.cli", "node.cli.main", "wire", "wire.frames")


@pytest.mark.parametrize(
    ("source", "wheel"),
    [
        ("from node.cli import main\n", "from thinwire.node.cli import main\n"),
        (
            "def f():\n    from wire import frames, front\n",
            "def f():\n    from thinwire.wire import frames, front\n",
        ),
        ("import os, wire.frames as f, json\n", "import os, thinwire.wire.frames as f, json\n"),
        ("'é'; from node import (\n    faults,\n)\n", "'é'; from thinwire.node import (\n    faults,\n)\n"),
        ("from . import node\nfrom nodes.x import y\nimport wired\n", None),
        ("'''node.cli.main'''\nKEY = ('node.key', 'wire', f'node-{1}')\n", None),
    ],
)
def test_imports_are_moved_below_one_package(source: str, wheel: str | None) -> None:
    assert moved(source, "node.x", MODULES) == (wheel or source)


@pytest.mark.parametrize(
    "line",
    ["import wire.frames", "x = 'node.cli.main'", "x = f'node.cli.{y}'", "call(['-m', 'wire.frames'])"],
)
def test_what_cannot_be_moved_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match=r"^node\.x:2: "):
        moved(f"import os\n{line}\n", "node.x", MODULES)


def test_modules_that_are_started_are_there() -> None:
    """`node.program` takes a string, which no type checker knows as a module."""
    called = {
        name
        for path in (ROOT / "node").rglob("*.py")
        for name in re.findall(r'program\("([\w.]+)"\)', path.read_text(encoding="utf-8"))
    }
    assert "cli.main" in called
    assert [name for name in called if not (ROOT / "node" / f"{name.replace('.', '/')}.py").is_file()] == []


def test_a_source_distribution_has_all_that_builds_and_tests(tmp_path: Path) -> None:
    """Byte for byte, so that a wheel built from it is the one that a checkout gives."""
    tree = tmp_path / "tree"
    unwanted = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "runs", "lab")
    shutil.copytree(
        ROOT, tree, ignore=lambda folder, names: unwanted(folder, names) if folder == str(ROOT) else []
    )
    code = "import build_backend; print(build_backend.build_sdist('..'))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tree,
        env={"PYTHONPATH": str(tree / "scripts")},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    name = done.stdout.splitlines()[-1]
    with tarfile.open(tmp_path / name) as archive:
        archive.extractall(tmp_path, filter="data")
    unpacked = tmp_path / name.removesuffix(".tar.gz")
    for folder in (*PACKAGES, "deploy", "proto", "scripts", "tests"):
        assert files(unpacked / folder) == files(ROOT / folder)
    for name in ("LICENSE", "Makefile", "README.md", "constraints.txt", "pyproject.toml"):
        assert (unpacked / name).read_bytes() == (ROOT / name).read_bytes()


def files(folder: Path) -> dict[str, bytes]:
    """Contents by relative path, without what Python compiled."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
