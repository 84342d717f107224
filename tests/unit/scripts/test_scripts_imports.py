"""A script finds what it imports when it is run by the command that its docstring or the Makefile gives.

`python scripts/NAME.py` has the folder of scripts on its path, not the repository's root, so it finds modules
beside it, but neither `scripts.*` nor `tests`; `python -m scripts.NAME` has the root, and not the folder.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "scripts"
FROM_THE_ROOT = {"scripts", "tests"}
OWN_PATH = "sys.path.insert(0, str(Path(__file__).resolve().parent))"
"""With this line a script finds modules beside it either way."""
ENTRIES = sorted(path.stem for path in FOLDER.glob("*.py") if '__name__ == "__main__"' in path.read_text())


def imported(source: str) -> set[str]:
    """Dotted modules that a source imports, anywhere in it; relative imports are found in any case."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            found.add(node.module)
    return found


def reached(name: str, folder: Path) -> dict[Path, set[str]]:
    """By file, what a script and all that it imports of its folder import."""
    found: dict[Path, set[str]] = {}
    waiting = [folder / f"{name}.py"]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found[path] = imported(path.read_text(encoding="utf-8"))
        for module in found[path]:
            waiting += beside(module.removeprefix("scripts."), folder)
    return found


def beside(module: str, folder: Path) -> Iterator[Path]:
    """The file of a module in the folder, if it is one of those there."""
    path = folder.joinpath(*module.split("."))
    yield from (one for one in (path.with_suffix(".py"), path / "__init__.py") if one.is_file())


def lost(name: str, folder: Path, *, by_path: bool) -> list[str]:
    """What is imported somewhere and not found when the script is run by its path, or else as a module."""
    modules = {module for found in reached(name, folder).values() for module in found}
    if by_path:
        return sorted(module for module in modules if module.split(".")[0] in FROM_THE_ROOT)
    if OWN_PATH in (folder / f"{name}.py").read_text(encoding="utf-8"):
        return []
    return sorted(module for module in modules if any(beside(module, folder)))


@pytest.mark.parametrize("name", ENTRIES)
def test_a_script_finds_its_imports_by_the_command_that_is_given(name: str) -> None:
    docstring = ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8")))
    text = f"{docstring}\n{(ROOT / 'Makefile').read_text(encoding='utf-8')}"
    by_path = re.search(rf"\bscripts/{name}\.py\b", text) is not None
    as_module = re.search(rf"-m scripts\.{name}\b", text) is not None
    assert by_path or as_module, "its docstring gives no command"
    assert not by_path or lost(name, FOLDER, by_path=True) == []
    assert not as_module or lost(name, FOLDER, by_path=False) == []


def test_what_is_not_found_is_named(tmp_path: Path) -> None:
    sources = {
        "draw.py": "import json\nfrom tables.losses import x",
        "late.py": "import relay\ndef f():\n    from scripts.draw import g\n    import tests.support",
        "either.py": f"{OWN_PATH}\nimport relay",
        "relay.py": "import wording",
        "wording.py": "import node",
        "tables/__init__.py": "",
        "tables/losses.py": "from .markdown import y\nfrom wording import z",
    }
    (tmp_path / "tables").mkdir()
    for path, source in sources.items():
        (tmp_path / path).write_text(source, encoding="utf-8")
    assert lost("draw", tmp_path, by_path=True) == []
    assert lost("draw", tmp_path, by_path=False) == ["tables.losses", "wording"]
    assert lost("late", tmp_path, by_path=True) == ["scripts.draw", "tests.support"]
    assert lost("either", tmp_path, by_path=True) == lost("either", tmp_path, by_path=False) == []
