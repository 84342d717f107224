"""The build backend: setuptools, with a wheel in which everything lies below `thinwire`.

In a checkout the program is the packages `kernels`, `wire` and `node`. Other distributions have packages of
these names, so a wheel has `thinwire.kernels`, `thinwire.wire` and `thinwire.node`, their imports rewritten.
Files such as `deploy/GUIDE.md` have the same place below `thinwire` as in a checkout.
"""

import ast
import contextlib
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
]

PACKAGES = ("kernels", "node", "wire")
PARENT = "thinwire"


def build_wheel(
    wheel_directory: str,
    config_settings: dict[str, str | list[str] | None] | None = None,
    metadata_directory: str | None = None,
) -> str:
    """Build a wheel of the source tree in the current directory, as PEP 517 says. Leaves nothing in the tree.

    Raises ValueError as `moved` does.
    """
    target = Path(wheel_directory).resolve()
    with tempfile.TemporaryDirectory(prefix="thinwire-wheel-") as folder:
        lay_out(Path.cwd(), Path(folder))
        with contextlib.chdir(folder):
            return build_meta.build_wheel(str(target), config_settings)


def lay_out(tree: Path, out: Path) -> None:
    """Write the project that a wheel is built from into the folder `out`. Raises ValueError as `moved`."""
    parent = out / PARENT
    for name in (*PACKAGES, "deploy"):
        shutil.copytree(tree / name, parent / name, ignore=shutil.ignore_patterns("__pycache__", "*.pyi"))
    summary = '"""Train language models across machines joined only by a slow network."""\n'
    (parent / "__init__.py").write_text(summary, encoding="utf-8")
    modules = {
        ".".join(path.relative_to(parent).with_suffix("").parts): path
        for package in PACKAGES
        for path in (parent / package).rglob("*")
        if path.is_dir() or path.suffix == ".py"
    }
    for name, path in modules.items():
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            if name.endswith("_pb2"):  # generated code says its own name
                text = text.replace(f"'{name}'", f"'{PARENT}.{name}'")
            path.write_text(moved(text, name, modules), encoding="utf-8")
    shutil.copy(tree / "LICENSE", out)
    for folder in (out, parent):
        shutil.copy(tree / "README.md", folder)
    project = (tree / "pyproject.toml").read_text(encoding="utf-8")
    project = project.replace('"node.cli.main:program"', f'"{PARENT}.node.cli.main:program"')
    (out / "pyproject.toml").write_text(project, encoding="utf-8")
    (out / "MANIFEST.in").write_text(f"graft {PARENT}\n", encoding="utf-8")


def moved(source: str, name: str, modules: Collection[str]) -> str:
    """The source of the module `name`, with `PARENT` before the packages that it imports.

    Raises ValueError, with a line, where that is not enough: for `import node.x`, after which the code says
    `node`, and for a string that names one of `modules`.
    """
    lines = source.encode().splitlines(keepends=True)
    tree = ast.parse(source)
    docstrings = {id(statement.value) for statement in ast.walk(tree) if isinstance(statement, ast.Expr)}
    places = []
    for part in ast.walk(tree):
        match part:
            case ast.ImportFrom(module=str(module), level=0) if _is_ours(module):
                places.append((part.lineno, part.col_offset + len("from ")))
            case ast.Import():
                for alias in part.names:
                    if _is_ours(alias.name):
                        if alias.asname is None:
                            raise ValueError(f"{name}:{part.lineno}: `import {alias.name}` without `as`")
                        places.append((alias.lineno, alias.col_offset))
            case ast.Constant(value=str(text)) if "." in text and text.rstrip(".") in modules:
                if id(part) not in docstrings:
                    raise ValueError(f"{name}:{part.lineno}: {text!r} names a module: use __name__")
    for line, column in sorted(places, reverse=True):
        before, after = lines[line - 1][:column], lines[line - 1][column:]
        lines[line - 1] = before + f"{PARENT}.".encode() + after
    return b"".join(lines).decode()


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in PACKAGES
