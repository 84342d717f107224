"""Tests over several ranks: each a process of its own, joined by gloo over a file."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 120


def run_ranks(script: str, ranks: int, folder: Path) -> None:
    """Run `script` once a rank, with FOLDER, RANK and RANKS in its environment and a group named by FOLDER.

    Raises AssertionError with what a rank printed if one fails.
    """
    (folder / "script.py").write_text(PROLOGUE + script, encoding="utf-8")
    workers = []
    for rank in range(ranks):
        environment = {
            **os.environ,
            "FOLDER": str(folder),
            "RANK": str(rank),
            "RANKS": str(ranks),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "PYTHONWARNINGS": "ignore",
        }
        workers.append(
            subprocess.Popen(
                [sys.executable, str(folder / "script.py")],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    said = []
    try:
        said = [worker.communicate(timeout=SECONDS)[0] for worker in workers]
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.kill()
                worker.wait()
    for rank, worker in enumerate(workers):
        assert worker.returncode == 0, f"rank {rank} ended with {worker.returncode}:\n{said[rank]}"


PROLOGUE = """
import os
from pathlib import Path

import torch
import torch.distributed as dist

FOLDER, RANK, RANKS = Path(os.environ["FOLDER"]), int(os.environ["RANK"]), int(os.environ["RANKS"])
dist.init_process_group("gloo", init_method=f"file://{FOLDER}/meet", rank=RANK, world_size=RANKS)
"""
