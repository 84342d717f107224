"""Check the rules of the house: direction of imports, no circles, arguments of constructors, and commands
that load no torch. Ruff knows what may not be called (pyproject.toml)."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from node.model.families.known import FAMILIES
from tests.support.cases import each

ROOT = Path(__file__).resolve().parents[2]
MAY_IMPORT = {"kernels": {"kernels"}, "wire": {"wire", "kernels"}, "node": {"node", "wire", "kernels"}}
OURS = {*MAY_IMPORT, "scripts", "tests"}
FLOORS = (
    *("cli", "processes", "lab", "dashboard", "display", "coordinator", "stage", "run_state", "view"),
    *("run_file", "tuning", "state", "training", "data", "schedule", "model"),
    *("telemetry", "config"),
)
"""Rooms of `node` from top to bottom: each imports only from rooms below it."""
NETWORK = {"aiohttp", "asyncio", "google", "grpc", "http", "socket", "ssl", "urllib"}
"""Modules that `kernels` may not import."""
IMPURE = {
    *NETWORK,
    "concurrent",
    "datetime",
    "io",
    "os",
    "random",
    "shutil",
    "sqlite3",
    "subprocess",
    "threading",
    "time",
}
"""Modules that `node/run_state` may not import: it does no I/O and takes time as an argument."""
GENERATED = "wire.v1"
EDGE = {
    Path(module)
    for module in (
        "node/coordinator/control_service.py",
        "node/coordinator/enrolment_service.py",
        "node/coordinator/layer_service.py",
        "node/coordinator/look_service.py",
        "node/coordinator/sessions.py",
        "node/processes/enrol.py",
        "node/processes/look.py",
        "node/stage/coordinator_client.py",
        "wire/connection.py",
        "wire/layer_exchange.py",
        "wire/messages_proto.py",
    )
}
"""Modules that may use protobuf's types."""
MOST_ARGUMENTS = 10
"""Of a constructor: with more, a class has too many subjects."""

TORCH_FREE = (
    *("compare", "config", "coordinator", "dashboard", "data", "evict"),
    *("plan", "recover", "resume", "status", "token", "top", "trace"),
)
"""Commands that run on small machines: they compute no tensors."""
HEAVY = {"numba", "torch", "triton"}

MODULES = sorted(
    path.relative_to(ROOT)
    for package in MAY_IMPORT
    for path in (ROOT / package).rglob("*.py")
    if not path.stem.endswith(("_pb2", "_pb2_grpc"))
)
MODULE_SET = frozenset(MODULES)


SCRIPTS = sorted(path.relative_to(ROOT) for path in (ROOT / "scripts").rglob("*.py"))


def imported(tree: ast.AST, module: Path) -> Iterator[str]:
    """Dotted names that a module imports; `from a import b` gives a.b, relative imports are resolved."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = module.parts[: -node.level] if node.level else ()
            base = [*package, *((node.module or "").split(".") if node.module else ())]
            yield from (".".join([*base, alias.name]) for alias in node.names)


def dotted(node: ast.expr) -> list[str]:
    """The names in a chain such as `a.b.c`; empty for anything else, such as an attribute of a call."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if isinstance(node, ast.Name) else []


class Facts(NamedTuple):
    """What the rules ask of a file. A syntax tree of each would take much memory."""

    imports: tuple[str, ...]
    """For a type checker too."""
    crowded: tuple[str, ...]
    families: tuple[str, ...]


@cache
def facts_of(file: Path) -> Facts:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return Facts(tuple(imported(tree, file)), tuple(crowded(tree)), tuple(family_names(tree)))


def wrong_imports(imports: Iterable[str], module: Path) -> list[str]:
    """Imports that `module` must not have: a package above it, the network, generated code, or I/O."""
    package = module.parts[0]
    strange = OURS - MAY_IMPORT[package]
    if package == "kernels":
        strange |= NETWORK
    elif module.parts[:2] == ("node", "run_state"):
        strange |= IMPURE
    return [
        name
        for name in imports
        if name.split(".")[0] in strange or (f"{name}.".startswith(f"{GENERATED}.") and module not in EDGE)
    ]


def crowded(tree: ast.AST) -> Iterator[str]:
    """Classes whose constructor takes more than `MOST_ARGUMENTS`, beside `self`."""
    for kind in ast.walk(tree):
        for method in kind.body if isinstance(kind, ast.ClassDef) else ():
            if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                arguments = method.args
                if len(arguments.posonlyargs + arguments.args + arguments.kwonlyargs) - 1 > MOST_ARGUMENTS:
                    yield kind.name


@cache
def module_of(name: str, known: frozenset[Path]) -> Path | None:
    """The file among `known` that the dotted name is, or is defined in; None if it is not ours."""
    for dotted_path in (name, name.rpartition(".")[0]):
        base = dotted_path.replace(".", "/")
        for path in (Path(f"{base}.py"), Path(base, "__init__.py")):
            if path in known:
                return path
    return None


Imports = dict[Path, set[Path]]


@cache
def all_imports() -> Imports:
    """Which of our modules each module and script imports, for a type checker too."""
    files = frozenset({*MODULES, *SCRIPTS})
    found: Imports = {}
    for file in files:
        imports = facts_of(file).imports
        found[file] = {target for name in imports if (target := module_of(name, files)) and target != file}
    return found


def room(module: Path) -> str | None:
    """The room of `node` that the module is in; None elsewhere, and for the package itself."""
    inside = module.parts[0] == "node" and module != Path("node/__init__.py")
    return Path(module.parts[1]).stem if inside else None


def upward(imports: Imports) -> list[str]:
    """Imports that go from a room of `node` to one above it, as "importer -> imported"."""
    return sorted(
        f"{file} -> {target}"
        for file, targets in imports.items()
        for target in targets
        if (here := room(file)) and (there := room(target)) and FLOORS.index(there) < FLOORS.index(here)
    )


def circles(imports: Imports) -> list[str]:
    """Circles among the children of any folder, files or folders, as "folder: child, child".

    A circle of files in different folders is a circle of the folders that hold them.
    """
    children: dict[Path, dict[str, set[str]]] = {}
    for file, targets in imports.items():
        for target in targets:
            depth = next(
                n
                for n, (one, other) in enumerate(zip(file.parts, target.parts, strict=False))
                if one != other
            )
            graph = children.setdefault(Path(*file.parts[:depth]), {})
            graph.setdefault(file.parts[depth], set()).add(target.parts[depth])
    found = set()
    for folder, graph in children.items():
        reached = {child: reachable(graph, child) for child in graph}
        for child in graph:
            if circle := {other for other in reached[child] if child in reached.get(other, ())}:
                found.add(f"{folder}: {', '.join(sorted(circle))}")
    return sorted(found)


def reachable(graph: Mapping[str, set[str]], start: str) -> set[str]:
    """Everything that one or more steps from `start` lead to."""
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        new = graph.get(waiting.pop(), set()) - seen
        seen |= new
        waiting += new
    return seen


def test_all_packages_and_rooms_are_checked() -> None:
    assert {module.parts[0] for module in MODULES} == set(MAY_IMPORT)
    assert set(MODULES) >= EDGE
    assert {name for module in MODULES if (name := room(module))} <= set(FLOORS), "give the room a floor"


DECLARATIONS = Path("node/model/families")
KNOWS_A_FAMILY = {Path("node/config/schema.py")}
"""It has the default of `model.family`."""


def family_names(tree: ast.AST) -> list[str]:
    """Names of model families that a module has as constants, and what compares `model.family`."""
    found = []
    for part in ast.walk(tree):
        if isinstance(part, ast.Constant) and part.value in FAMILIES:
            found.append(part.value)
        sides = [part.left, *part.comparators] if isinstance(part, ast.Compare) else []
        if isinstance(part, ast.Match):
            sides = [part.subject]
        found += [".".join(dotted(side)) for side in sides if dotted(side)[-2:] == ["model", "family"]]
    return found


def test_what_depends_on_a_family_is_in_its_declaration() -> None:
    outside = [path for path in MODULES if DECLARATIONS not in path.parents and path not in KNOWS_A_FAMILY]
    named = {str(path): facts_of(path).families for path in outside}
    assert {path: names for path, names in named.items() if names} == {}


@each(
    ("source", "found"),
    [
        ('wide = 2 if model.family == "llama" else 1', ["llama", "model.family"]),
        ("found = self._config.model.family != name", ["self._config.model.family"]),
        ("if model.family in FAMILIES: pass", ["model.family"]),
        ("family_of(model).norm_has_bias", []),
    ],
)
def test_a_module_that_asks_for_a_family_is_found(source: str, found: list[str]) -> None:
    assert sorted(family_names(ast.parse(source))) == sorted(found)


def test_the_page_of_node_lists_its_rooms_in_order() -> None:
    text = (ROOT / "node" / "README.md").read_text(encoding="utf-8")
    assert tuple(re.findall(r"^    ([a-z_]+)(?:/|\.py) ", text, re.MULTILINE)) == FLOORS


def test_no_room_imports_from_a_room_above_it() -> None:
    assert upward(all_imports()) == [], "see FLOORS for the order"


def test_no_imports_form_a_circle() -> None:
    assert circles(all_imports()) == [], "move what both need into a module below them"


@pytest.mark.parametrize(
    ("imports", "found"),
    [
        ({"node/view/a.py": "node/stage/b.py"}, ["node/view/a.py -> node/stage/b.py"]),
        ({"node/config/a.py": "node/state/b.py"}, ["node/config/a.py -> node/state/b.py"]),
        ({"node/model/x/a.py": "node/cli/y/b.py"}, ["node/model/x/a.py -> node/cli/y/b.py"]),
        ({"node/stage/a.py": "node/view/b.py", "node/telemetry/a.py": "node/config/b.py"}, []),
        ({"node/stage/a.py": "node/stage/b.py", "wire/a.py": "wire/codecs/b.py"}, []),
        ({"scripts/a.py": "node/cli/b.py", "node/stage/a.py": "node/__init__.py"}, []),
    ],
)
def test_upward_imports_are_found(imports: dict[str, str], found: list[str]) -> None:
    assert upward({Path(file): {Path(target)} for file, target in imports.items()}) == found


@pytest.mark.parametrize(
    ("imports", "found"),
    [
        ("wire/a.py wire/b.py, wire/b.py wire/a.py", ["wire: a.py, b.py"]),
        ("wire/a.py wire/b.py, wire/b.py wire/c.py, wire/c.py wire/a.py", ["wire: a.py, b.py, c.py"]),
        ("node/x/a.py node/y/a.py, node/y/b.py node/x/b.py", ["node: x, y"]),
        ("node/x/a.py node/y/a.py, node/y/a.py node/x/a.py", ["node: x, y"]),
        ("wire/codecs/a.py wire/b.py, wire/b.py wire/codecs/c.py", ["wire: b.py, codecs"]),
        ("wire/a.py wire/codecs/b.py, wire/codecs/b.py wire/c.py, wire/d.py wire/a.py", []),
        ("node/x/a.py node/x/b.py, node/x/b.py node/y/a.py, node/x/c.py node/x/a.py", []),
    ],
)
def test_circles_are_found(imports: str, found: list[str]) -> None:
    graph: Imports = {}
    for pair in imports.split(", "):
        file, target = map(Path, pair.split())
        graph.setdefault(file, set()).add(target)
    assert circles(graph) == found


@each("module", MODULES)
def test_module_keeps_the_rules(module: Path) -> None:
    facts = facts_of(module)
    assert wrong_imports(facts.imports, module) == [], (
        "imports point one way: node -> wire -> kernels, which knows no network; protobuf stays at the edge; "
        "the state machine does no I/O"
    )
    assert facts.crowded == (), "split the class: one subject each"


@each(
    ("module", "source", "found"),
    [
        ("kernels/a.py", "import wire.frames", ["wire.frames"]),
        ("kernels/a.py", "from node import stage", ["node.stage"]),
        ("kernels/sub/a.py", "from ..b import c\nimport torch, numpy", []),
        (
            "wire/a.py",
            "def f():\n    from node.schedule.schedule import Kind",
            ["node.schedule.schedule.Kind"],
        ),
        ("wire/a.py", "import kernels.pack\nfrom .node import x", []),
        ("node/a.py", "import wire, kernels, node.stage, asyncio, wire.v10", []),
        ("kernels/a.py", "import asyncio, torch\nfrom socket import socket", ["asyncio", "socket.socket"]),
        ("node/a.py", "from wire.v1 import link_pb2", ["wire.v1.link_pb2"]),
        ("wire/connection.py", "from wire.v1 import link_pb2", []),
        (
            "node/run_state/a.py",
            "import asyncio, math\nfrom time import monotonic",
            ["asyncio", "time.monotonic"],
        ),
    ],
)
def test_imports_against_the_direction_are_found(module: str, source: str, found: list[str]) -> None:
    assert wrong_imports(imported(ast.parse(source), Path(module)), Path(module)) == found


class _AtRuntime(ast.NodeTransformer):
    """Removes imports that only a type checker sees."""

    def visit_If(self, node: ast.If) -> ast.If | list[ast.stmt]:
        checked = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        return node.orelse if checked else node


@cache
def imported_at_runtime(module: Path) -> tuple[str, ...]:
    """As `imported`, without imports that only a type checker sees."""
    source = (ROOT / module).read_text(encoding="utf-8")
    if "TYPE_CHECKING" not in source:
        return facts_of(module).imports
    return tuple(imported(_AtRuntime().visit(ast.parse(source)), module))


def brought_in(start: Path) -> dict[str, Path]:
    """Every name that running `start` may import, directly or through our modules, and a module that does.

    Imports inside functions count; imports of other packages are not followed.
    """
    found: dict[str, Path] = {}
    waiting, seen = [start], {start}
    while waiting:
        module = waiting.pop()
        for name in imported_at_runtime(module):
            found.setdefault(name, module)
            if (ours := module_of(name, MODULE_SET)) and ours not in seen:
                seen.add(ours)
                waiting.append(ours)
    return found


def loaded_by(names: Iterable[str]) -> list[str]:
    """The modules of `HEAVY` that importing these names loads, and the name that loads each first, as "torch
    by kernels.fp8.reference". Names that are not ours may be missing."""
    script = (
        "import contextlib, pkgutil, sys\n"
        f"heavy = {HEAVY!r}\n"
        "for name in sys.argv[1:]:\n"
        f"    ours = name.split('.')[0] in {set(MAY_IMPORT)!r}\n"
        "    with contextlib.nullcontext() if ours else contextlib.suppress(ImportError):\n"
        "        pkgutil.resolve_name(name)\n"
        "    for found in sorted(heavy & sys.modules.keys()):\n"
        "        print(found, 'by', name)\n"
        "        heavy.remove(found)"
    )
    command = [sys.executable, "-c", script, *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_commands_without_tensors_load_no_torch() -> None:
    """By importing them, with everything that other packages import in turn."""
    names = ["node.cli.main"]
    for command in TORCH_FREE:
        names += [f"node.cli.{command}", *brought_in(Path(f"node/cli/{command}.py"))]
    assert loaded_by(dict.fromkeys(names)) == []


def test_a_node_loads_no_numba_before_it_packs_on_its_cpu() -> None:
    """On a GPU it never does. numba is a sixth of what a node's imports take, and 57 MB."""
    names = ["node.processes.node", "node.stage.worker", "wire.codecs.tah", "wire.codecs.aqsgd"]
    assert [line for line in loaded_by(names) if line.startswith("numba")] == []


def test_what_loads_something_heavy_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    names = brought_in(Path("node/cli/join.py"))
    assert "torch" in names and any(name.startswith("kernels.fp8.reference.") for name in names)
    # Something that is light, and that no module of ours imports.
    monkeypatch.setattr(sys.modules[__name__], "HEAVY", {"colorsys"})
    assert loaded_by(["node.cli.main", "colorsys.rgb_to_yiq"]) == ["colorsys by colorsys.rgb_to_yiq"]
