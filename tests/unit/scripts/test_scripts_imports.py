"""Every script runs as a module from the repository's root and can be imported there."""

import ast
import re
from pathlib import Path

from tests.support.cases import each

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = sorted(path.relative_to(ROOT) for path in (ROOT / "scripts").rglob("*.py"))
ENTRIES = [path for path in SCRIPTS if 'if __name__ == "__main__":' in (ROOT / path).read_text("utf-8")]


def lost(source: str, root: Path) -> list[str]:
    """Modules of `scripts` and `tests` that a source imports, anywhere in it, and that are not there."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add("." * node.level + node.module)
    return sorted(name for name in found if not is_found(name, root))


def is_found(module: str, root: Path) -> bool:
    """Whether a module is there. One of another package is: its import says so itself."""
    if module.startswith(".") or any((root / "scripts").rglob(f"{module.split('.')[0]}.py")):
        return False
    if module.split(".")[0] not in ("scripts", "tests"):
        return True
    path = root.joinpath(*module.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


@each("path", SCRIPTS)
def test_a_script_imports_what_is_found_from_the_root(path: Path) -> None:
    assert lost((ROOT / path).read_text(encoding="utf-8"), ROOT) == []


@each("path", ENTRIES)
def test_a_script_gives_the_command_that_runs_it(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse((ROOT / path).read_text(encoding="utf-8")))
    text = f"{docstring}\n{(ROOT / 'Makefile').read_text(encoding='utf-8')}"
    module = ".".join(path.with_suffix("").parts)
    assert re.search(rf"-m {re.escape(module)}\b", text), "its docstring gives no command"
