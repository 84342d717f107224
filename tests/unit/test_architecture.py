"""The house's rules that a machine can check: direction of imports, forbidden calls, size of modules, and
which commands do without torch."""

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAY_IMPORT = {"kernels": {"kernels"}, "wire": {"wire", "kernels"}, "node": {"node", "wire", "kernels"}}
NETWORK = {"aiohttp", "asyncio", "google", "grpc", "http", "socket", "ssl", "urllib"}
"""What `kernels` knows nothing of."""
GENERATED = "wire.v1"
EDGE = {
    Path(module)
    for module in (
        "node/coordinator/control_service.py",
        "node/coordinator/enrolment_service.py",
        "node/processes/coordinator.py",
        "node/processes/join.py",
        "node/stage/coordinator_client.py",
        "wire/connection.py",
        "wire/messages_proto.py",
        "wire/telemetry_proto.py",
    )
}
"""Where protobuf's types may be seen: everything else has types of its own."""
LINES = 400

# Unpickling runs code of the sender's choosing; sleeping blocks an event loop or a compute thread.
FORBIDDEN = ("pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "torch.load", "time.sleep")

TORCH_FREE = (
    *("compare", "config", "coordinator", "dashboard", "evict"),
    *("resume", "status", "token", "top", "trace"),
)
"""Commands for which a small machine does: they do no arithmetic on tensors."""
HEAVY = {"numba", "torch", "triton"}

MODULES = sorted(
    path.relative_to(ROOT)
    for package in MAY_IMPORT
    for path in (ROOT / package).rglob("*.py")
    if not path.stem.endswith(("_pb2", "_pb2_grpc"))
)
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


def used(tree: ast.AST) -> Iterator[str]:
    """Dotted attributes that a module reads, such as torch.load; aliases of modules are resolved."""
    aliases = {
        alias.asname: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.asname
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (names := dotted(node)):
            yield ".".join([aliases.get(names[0], names[0]), *names[1:]])


def dotted(node: ast.expr) -> list[str]:
    """The names of an attribute of an attribute of a name; none of what is no such chain, as nothing is
    forbidden of what a call gives."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if isinstance(node, ast.Name) else []


def wrong_imports(tree: ast.AST, module: Path) -> list[str]:
    """Imports that `module` must not have: of our packages above it, of a network, of generated code."""
    package = module.parts[0]
    strange = MAY_IMPORT.keys() - MAY_IMPORT[package] | (NETWORK if package == "kernels" else set())
    return [
        name
        for name in imported(tree, module)
        if name.split(".")[0] in strange or (f"{name}.".startswith(f"{GENERATED}.") and module not in EDGE)
    ]


def forbidden_names(tree: ast.AST, module: Path) -> list[str]:
    """Imports and attributes that are, or lie in, something forbidden."""
    names = {*imported(tree, module), *used(tree)}
    return sorted(n for n in names if any(n == bad or n.startswith(bad + ".") for bad in FORBIDDEN))


def test_all_packages_are_looked_at() -> None:
    assert {module.parts[0] for module in MODULES} == set(MAY_IMPORT)
    assert set(MODULES) >= EDGE


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_module_keeps_the_rules(module: Path) -> None:
    source = (ROOT / module).read_text(encoding="utf-8")
    tree = ast.parse(source)
    assert wrong_imports(tree, module) == [], (
        "imports point one way: node -> wire -> kernels, which knows no network; protobuf stays at the edge"
    )
    assert forbidden_names(tree, module) == [], "no pickle, no torch.load, no time.sleep"
    assert len(source.splitlines()) <= LINES, "split the module: one subject each"


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_a_script_is_no_longer_than_a_module(script: Path) -> None:
    lines = (ROOT / script).read_text(encoding="utf-8").splitlines()
    assert len(lines) <= LINES, "split the script: one subject each, in a folder or a module beside it"


@pytest.mark.parametrize(
    ("module", "source", "found"),
    [
        ("kernels/a.py", "import wire.frames", ["wire.frames"]),
        ("kernels/a.py", "from node import stage", ["node.stage"]),
        ("kernels/sub/a.py", "from ..b import c\nimport torch, numpy", []),
        ("wire/a.py", "def f():\n    from node.pipeline.schedule import Kind", ["node.pipeline.schedule.Kind"]),
        ("wire/a.py", "import kernels.pack\nfrom .node import x", []),
        ("node/a.py", "import wire, kernels, node.stage, asyncio, wire.v10", []),
        ("kernels/a.py", "import asyncio, torch\nfrom socket import socket", ["asyncio", "socket.socket"]),
        ("node/a.py", "from wire.v1 import link_pb2", ["wire.v1.link_pb2"]),
        ("wire/connection.py", "from wire.v1 import link_pb2", []),
    ],
)
def test_imports_against_the_direction_are_found(module: str, source: str, found: list[str]) -> None:
    assert wrong_imports(ast.parse(source), Path(module)) == found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import pickle", ["pickle"]),
        ("from pickle import loads", ["pickle.loads"]),
        ("from torch import load", ["torch.load"]),
        ("import torch\ntorch.load(path)", ["torch.load"]),
        ("import torch as t\nt.load(path)", ["torch.load"]),
        ("from time import sleep as nap", ["time.sleep"]),
        ("import time\nwait = time.sleep", ["time.sleep"]),
        ("import asyncio, time\ntime.monotonic()\nasyncio.sleep(0)\nself.torch.load()", []),
    ],
)
def test_forbidden_names_are_found(source: str, found: list[str]) -> None:
    assert forbidden_names(ast.parse(source), Path("node/a.py")) == found


class _AtRuntime(ast.NodeTransformer):
    """Takes away what only a type checker imports."""

    def visit_If(self, node: ast.If) -> ast.If | list[ast.stmt]:
        return node.orelse if ast.unparse(node.test) == "TYPE_CHECKING" else node


@cache
def imported_at_runtime(module: Path) -> tuple[str, ...]:
    """As `imported`, without what only a type checker imports."""
    tree = _AtRuntime().visit(ast.parse((ROOT / module).read_text(encoding="utf-8")))
    return tuple(imported(tree, module))


def brought_in(start: Path) -> dict[str, Path]:
    """Each dotted name that running `start` may import, within functions too, and a module that does so.

    As `imported_at_runtime`; what our modules import is followed, what others do is not.
    """
    found: dict[str, Path] = {}
    waiting, seen = [start], {start}
    while waiting:
        module = waiting.pop()
        for name in imported_at_runtime(module):
            found.setdefault(name, module)
            for one in (name, name.rpartition(".")[0]):
                if (ours := Path(f"{one.replace('.', '/')}.py")) in MODULES and ours not in seen:
                    seen.add(ours)
                    waiting.append(ours)
    return found


def loaded_by(names: Iterable[str]) -> list[str]:
    """What of `HEAVY` a new interpreter has loaded that imports all of these, and which name did: "torch by
    kernels.fp8.reference". Not ours may be missing."""
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


@pytest.mark.parametrize("command", TORCH_FREE)
def test_a_command_without_tensors_names_no_torch(command: str) -> None:
    """By what our modules say that it may import."""
    names = brought_in(Path(f"node/cli/{command}.py"))
    said = {name: str(where) for name, where in names.items() if name.split(".")[0] in HEAVY}
    assert said == {}, "sizes and names have modules without torch: wire/codecs/forms.py, kernels/*_layout.py"


def test_commands_without_tensors_load_no_torch() -> None:
    """By what is there when all that they may import has been, by them and by what is not ours."""
    names = ["node.cli.main"]
    for command in TORCH_FREE:
        names += [f"node.cli.{command}", *brought_in(Path(f"node/cli/{command}.py"))]
    assert loaded_by(dict.fromkeys(names)) == []


def test_a_command_with_tensors_is_found_to_load_torch() -> None:
    names = brought_in(Path("node/cli/join.py"))
    assert "torch" in names and any(name.startswith("kernels.fp8.reference.") for name in names)
    assert "torch by kernels.fp8.reference" in loaded_by(["node.cli.main", "kernels.fp8.reference"])


def test_what_only_a_type_checker_imports_brings_nothing_in() -> None:
    assert "torch" in imported(
        ast.parse((ROOT / "wire/spec.py").read_text(encoding="utf-8")), Path("wire/spec.py")
    )
    assert "torch" not in brought_in(Path("wire/spec.py"))
