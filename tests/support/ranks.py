"""Tests over several ranks: each a process of its own, joined by gloo over a file."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.paths import python_path
from tests.support.process import Launch

SECONDS = 120


def run_ranks(script: str, ranks: int, folder: Path, launch: Launch) -> None:
    """Run `script` once a rank, with FOLDER, RANK and RANKS in its environment and a group named by FOLDER.

    Raises AssertionError with what a rank printed if one fails.
    """
    file = folder / "script.py"
    file.write_text(PROLOGUE + script, encoding="utf-8")
    said = [folder / f"rank-{rank}.txt" for rank in range(ranks)]
    workers = []
    try:
        for rank in range(ranks):
            environment = {
                **os.environ,
                "FOLDER": str(folder),
                "RANK": str(rank),
                "RANKS": str(ranks),
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": python_path(),
                "PYTHONWARNINGS": "ignore",
            }
            with said[rank].open("wb") as output:
                workers.append(
                    launch(
                        [sys.executable, str(file)],
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        text=True,
                    )
                )
        codes = [worker.wait(SECONDS) for worker in workers]
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.kill()
                worker.wait()
    for rank, code in enumerate(codes):
        assert code == 0, f"rank {rank} ended with {code}:\n{said[rank].read_text()}"


PROLOGUE = """
import os
from pathlib import Path

import torch
import torch.distributed as dist

FOLDER, RANK, RANKS = Path(os.environ["FOLDER"]), int(os.environ["RANK"]), int(os.environ["RANKS"])
dist.init_process_group("gloo", init_method=f"file://{FOLDER}/meet", rank=RANK, world_size=RANKS)
"""
