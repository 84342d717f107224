"""Compiled loops that are older than what they were compiled from are not used again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.common.loops import forget_older
from tests.support.paths import python_path


@pytest.mark.parametrize(("age", "kept"), [(-1, False), (1, True)])
def test_what_is_older_than_any_source_is_removed(age: int, kept: bool, tmp_path: Path) -> None:
    sources = [tmp_path / "loops.py", tmp_path / "tiles.py"]
    for number, source in enumerate(sources):
        source.write_text("")
        os.utime(source, (1000 + number, 1000 + number))
    cache = tmp_path / "cache"
    cache.mkdir()
    loops = [cache / f"tah_loops.encode-1.py311.{end}" for end in ("nbi", "1.nbc", "2.nbc")]
    others = [cache / f"trellis_lanes.search-1.py311.{end}" for end in ("nbi", "1.nbc")]
    for path in (*loops, *others):
        path.write_text("")
        os.utime(path, (1001 + age, 1001 + age))
    forget_older(cache, sources)
    assert [path.exists() for path in loops] == [kept] * 3
    assert all(path.exists() for path in others)


def test_nothing_compiled_yet_is_fine(tmp_path: Path) -> None:
    source = tmp_path / "loops.py"
    source.write_text("")
    forget_older(tmp_path / "absent", [source])


NOWHERE = """
import hashlib
import sys
from numba.core import caching

if sys.argv[1] == "nowhere":
    for locator in caching.CacheImpl._locator_classes:
        locator.from_function = classmethod(lambda *_: None)

import torch
from wire.codecs.registry import codec

packed = codec("tah").pack(torch.linspace(-3, 5, 300).view(2, 150))
print(hashlib.sha256(packed.numpy().tobytes()).hexdigest())
"""


def test_loops_work_where_nothing_may_be_kept() -> None:
    """As under a user without a home, in an installation that is not theirs."""

    def run(where: str) -> "subprocess.CompletedProcess[str]":
        command = (sys.executable, "-c", NOWHERE, where)
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=150,
            env={**os.environ, "PYTHONPATH": python_path()},
        )

    kept, nowhere = run("anywhere"), run("nowhere")
    assert nowhere.returncode == 0, nowhere.stderr
    assert nowhere.stderr.startswith("numba can keep nothing") and kept.stderr == ""
    assert nowhere.stdout == kept.stdout
