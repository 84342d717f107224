"""Compiled loops are kept, found again, and never used for other sources than they were compiled from."""

import fcntl
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from kernels.common import compile_turn, loops
from kernels.common.compile_turn import CompileTurn
from tests.support.fault_prefork import Prefork


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


FILES = {"tiles.py": "TILE = 64", "tah/loops.py": "x = 1", "tah/notes.md": "x"}


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({}, True),
        ({"tah/notes.md": "y"}, True),
        ({"triton/tiles.py": "TILE = 1"}, True),
        ({"tiles.py": "TILE = 32"}, False),
        ({"tah/more.py": ""}, False),
    ],
)
def test_the_hash_follows_what_loops_depend_on(change: dict[str, str], same: bool, tmp_path: Path) -> None:
    write(tmp_path, FILES)
    before = loops.hash_of_sources(tmp_path)
    write(tmp_path, change)
    os.utime(tmp_path / "tah/loops.py", (1000, 1000))
    assert (loops.hash_of_sources(tmp_path) == before) is same


def test_a_text_that_moves_from_file_to_file_changes_the_hash(tmp_path: Path) -> None:
    hashes = set()
    for number, (one, other) in enumerate([("ab", ""), ("a", "b"), ("", "ab")]):
        folder = tmp_path / str(number)
        folder.mkdir()
        write(folder, {"a.py": one, "b.py": other})
        hashes.add(loops.hash_of_sources(folder))
    assert len(hashes) == 3


MODULE = """
from kernels.common.loops import compiled
from helper import FACTOR

@compiled
def scaled(x):
    return x * FACTOR
"""


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, str], ModuleType]:
    """Import the module above again, with another factor beside it, under a hash of the sources."""
    source = tmp_path / "factor_loops.py"
    source.write_text(MODULE)

    def made(factor: int, sources: str) -> ModuleType:
        helper = ModuleType("helper")
        vars(helper)["FACTOR"] = factor
        monkeypatch.setitem(sys.modules, "helper", helper)
        monkeypatch.setattr(loops, "SOURCES", sources)
        spec = importlib.util.spec_from_file_location("factor_loops", source)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "factor_loops", module)
        spec.loader.exec_module(module)
        return module

    return made


def test_what_was_compiled_is_used_for_the_same_sources_alone(
    load: Callable[[int, str], ModuleType], tmp_path: Path
) -> None:
    """The factor stands in another file, whose change numba does not see."""
    module = load(2, "before")
    assert module.scaled(10) == 20
    assert sum(module.scaled.stats.cache_hits.values()) == 0
    # As if read back by another process: the factor was compiled in.
    module = load(3, "before")
    assert module.scaled(10) == 20
    assert sum(module.scaled.stats.cache_hits.values()) == 1
    module = load(3, "after")
    assert module.scaled(10) == 30
    assert sum(module.scaled.stats.cache_hits.values()) == 0
    module = load(2, "before")
    assert module.scaled(10) == 20
    assert sum(module.scaled.stats.cache_hits.values()) == 1
    assert {path.name.rpartition("-")[2].partition(".")[0] for path in tmp_path.rglob("*.nb[ic]")} == {
        "before",
        "after",
    }


def test_a_loop_that_is_found_compiled_is_loaded_without_the_compiler(
    load: Callable[[int, str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Importing all that the compiler can translate takes longer than loading a codec's loops."""
    assert load(2, "before").scaled(10) == 20
    scaled = load(2, "before").scaled

    def refused(_: object) -> None:
        raise AssertionError("the compiler was made ready")

    monkeypatch.setattr(type(scaled.targetctx), "refresh", refused)
    assert scaled(10) == 20
    assert sum(scaled.stats.cache_hits.values()) == 1


def test_processes_that_save_at_once_get_no_code_of_each_other(tmp_path: Path) -> None:
    """Both have read the index before either writes it: an entry may be lost, never mistaken."""
    one, other = (loops._Files(str(tmp_path), "f", "sources") for _ in range(2))
    empty = other._load_index()
    one.save("int32", "code of int32")
    other._load_index = lambda: empty
    other.save("float32", "code of float32")
    again = loops._Files(str(tmp_path), "f", "sources")
    assert again.load("float32") == "code of float32"
    assert again.load("int32") is None
    one.save("int32", "code of int32")
    assert again.load("int32") == "code of int32" and again.load("float32") == "code of float32"
    assert loops._Files(str(tmp_path), "f", "other sources").load("int32") is None


SEVERAL = """
import sys
import numba
import numpy as np
sys.path.insert(0, sys.argv[1])
# A cache of their own: nobody else's turn is in their way.
numba.config.CACHE_DIR = sys.argv[1] + "/kept"
from factor_loops import scaled
for dtype in sys.argv[2:]:
    print(scaled(np.dtype(dtype).type(3)))
print(sum(scaled.stats.cache_misses.values()))
"""


def test_of_processes_that_start_at_once_one_compiles_and_all_have_it(
    prefork: Prefork, tmp_path: Path
) -> None:
    write(tmp_path, {"factor_loops.py": MODULE, "helper.py": "FACTOR = 2", "several.py": SEVERAL})
    dtypes = ["int64", "float32"]
    started = [
        prefork.popen(
            (sys.executable, str(tmp_path / "several.py"), str(tmp_path), *dtypes[turn:], *dtypes[:turn]),
            stdout=subprocess.PIPE,
            text=True,
        )
        for turn in range(2)
    ]
    compilations = 0
    for process in started:
        assert process.stdout is not None
        with process.stdout as output:
            *printed, misses = output.read().splitlines()
        assert list(map(float, printed)) == [6.0, 6.0]
        assert process.wait(150) == 0
        compilations += int(misses)
    assert compilations == len(dtypes)


def test_a_turn_is_one_process_s_until_the_outermost_function_is_compiled(tmp_path: Path) -> None:
    one, other = (CompileTurn(tmp_path / "lock") for _ in range(2))

    def is_free() -> bool:
        with (tmp_path / "lock").open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

    with one:
        one.take()
        with one:
            one.take()
        assert not is_free()
    assert is_free()
    with other:
        other.take()
        assert not is_free()
    assert is_free()


def test_who_waits_too_long_for_its_turn_compiles_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As beside a process that is frozen, and where no file can be locked."""
    monkeypatch.setattr(compile_turn, "WAIT_SECONDS", 0.0)
    one, other = (CompileTurn(tmp_path / "lock") for _ in range(2))
    with one, other:
        one.take()
        other.take()
    with CompileTurn(tmp_path / "no such folder" / "lock") as nowhere:
        nowhere.take()


NOWHERE = """
import sys
from numba.core import caching

for locator in caching.CacheImpl._locator_classes:
    locator.from_function = classmethod(lambda *_: None)

sys.modules.pop("kernels.common.loops", None)  # the process is forked from one that may keep them
sys.path.insert(0, sys.argv[1])
from factor_loops import scaled
print(scaled(21))
"""


def test_loops_work_where_nothing_may_be_kept(prefork: Prefork, tmp_path: Path) -> None:
    """As under a user without a home, in an installation that belongs to somebody else."""
    write(tmp_path, {"factor_loops.py": MODULE, "helper.py": "FACTOR = 2", "nowhere.py": NOWHERE})
    nowhere = prefork.popen(
        (sys.executable, str(tmp_path / "nowhere.py"), str(tmp_path)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert nowhere.stdout is not None
    with nowhere.stdout as output:
        told = output.read()
    assert nowhere.wait(150) == 0, told
    assert told.startswith("numba cannot keep") and told.count("numba cannot keep") == 1
    assert told.endswith("\n42\n")
    assert list(tmp_path.rglob("*.nb[ic]")) == []
