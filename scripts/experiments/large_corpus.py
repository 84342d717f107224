"""Train on a corpus larger than memory: `python -m scripts.experiments.large_corpus --json PATH`.

The corpus is a folder of JSONL files with Python's standard library as documents; its files are links to one,
which the coordinator cannot know and reads as so many. A coordinator and two nodes are started, as by people,
and timed until the first step is done. Another run of the same, tokenizing from the start too, is stopped in
the middle and resumed; both must end with the same weights.
"""

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from node.config.schema import DataSection, ModelSection, RunConfig, TrainingSection
from node.data.text import standard_library_files
from node.data.tokenizer import load_tokenizer
from node.lab.results import commit, hardware
from scripts.experiments.fine_tuning import make_tokenizer
from scripts.report import write
from tests.support.run_harness import SMALL, Coordinator, Run

VOCABULARY = 8192
STEPS, STOPPED_AT = 24, 12
LIMIT_SECONDS = 600.0
TIMED_BYTES = 24 << 20
"""Of the text, to measure how fast it is tokenized."""


@dataclass(frozen=True)
class Corpus:
    """The folder, and what was written to make it."""

    folder: Path
    tokenizer: Path
    files: int
    bytes: int
    hours: float
    """To tokenize all of it, at the rate of its beginning."""


def make_corpus(folder: Path, least_bytes: float) -> Corpus:
    """Files of about 30 MB until they have `least_bytes`, and a tokenizer."""
    data, tokenizer = folder / "data", folder / "tokenizer"
    data.mkdir(parents=True)
    make_tokenizer(VOCABULARY, tokenizer)
    first = data / "part-00000.jsonl"
    texts = [path.read_bytes().decode(errors="replace") for path in standard_library_files()]
    with first.open("w", encoding="utf-8") as file:
        for text in texts:
            file.write(json.dumps({"text": text}) + "\n")
    size = first.stat().st_size
    files = int(least_bytes // size) + 1
    for number in range(1, files):
        (data / f"part-{number:05}.jsonl").hardlink_to(first)
    return Corpus(
        data, tokenizer, files, files * size, files * size / tokenizing_rate(tokenizer, texts) / 3600
    )


def tokenizing_rate(tokenizer: Path, texts: list[str]) -> float:
    """Bytes a second, on all cores."""
    ready = load_tokenizer(str(tokenizer))
    pieces: list[bytes] = []
    size = 0
    for text in texts:
        pieces.append(text.encode())
        size += len(pieces[-1])
        if size >= TIMED_BYTES:
            break
    began = time.perf_counter()
    for start in range(0, len(pieces), 64):
        ready.encode(pieces[start : start + 64])
    return size / (time.perf_counter() - began)


def config_of(corpus: Corpus) -> RunConfig:
    """A small model, so that the data is what takes time."""
    return replace(
        SMALL,
        run=replace(SMALL.run, steps=STEPS),
        model=ModelSection(layers=4, hidden=64, heads=4, kv_heads=2, ffn=128, vocab=VOCABULARY, sequence=512),
        data=DataSection(sources=(str(corpus.folder),), tokenizer=str(corpus.tokenizer)),
        training=TrainingSection(global_batch=16, microbatch=4, warmup_steps=4),
        pipeline=replace(SMALL.pipeline, stages=2, forward_codec="tah", backward_codec="fixed-8"),
    )


@contextmanager
def fresh_cache(folder: Path) -> Iterator[None]:
    """No tokens are kept from before."""
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    yield
    shutil.rmtree(folder / "cache", ignore_errors=True)


def peak_bytes(process: Coordinator) -> int:
    """Most memory that a process had so far."""
    for line in Path(f"/proc/{process.pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) << 10
    raise SystemExit("this system does not say how much memory a process had")


def measure(folder: Path, corpus: Corpus) -> dict[str, Any]:
    """Both runs."""
    config = config_of(corpus)
    with fresh_cache(folder), Run(folder / "whole", config) as run:
        began = time.monotonic()
        coordinator = run.start()
        run.add_nodes(2)
        coordinator.wait_step(1, LIMIT_SECONDS)
        first = time.monotonic() - began
        coordinator.wait_step(STEPS, LIMIT_SECONDS)
        peak = peak_bytes(coordinator)
        coordinator.wait_exit(LIMIT_SECONDS)
        weights, losses = run.weights_sha256, run.losses
    with fresh_cache(folder), Run(folder / "resumed", config) as run:
        coordinator = run.start()
        run.add_nodes(2)
        coordinator.wait_step(STOPPED_AT, LIMIT_SECONDS)
        coordinator.interrupt()
        coordinator.wait_exit(LIMIT_SECONDS)
        stopped = max(run.losses)
        began = time.monotonic()
        coordinator = run.resume()
        run.add_nodes(2)
        coordinator.wait_step(stopped + 1, LIMIT_SECONDS)
        again = time.monotonic() - began
        coordinator.wait_exit(LIMIT_SECONDS)
        same = run.weights_sha256 == weights and run.losses == losses
    return {
        "seconds_to_first_step": first,
        "coordinator_peak_bytes": peak,
        "steps": STEPS,
        "stopped_after": stopped,
        "seconds_to_first_step_of_resume": again,
        "resume_has_the_same_bits": same,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Train on a corpus larger than memory.")
    parser.add_argument("--json", type=Path, required=True, help="write the report there")
    parser.add_argument("--gigabytes", type=float, default=32.0, help="least size of the corpus")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for run in ("whole", "resumed"):
            (folder / run).mkdir()
        corpus = make_corpus(folder / "corpus", arguments.gigabytes * 1e9)
        report = {
            "experiment": "large_corpus",
            "commit": commit(),
            "hardware": hardware(),
            "python": platform.python_version(),
            "runs": 1,
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "corpus_bytes": corpus.bytes,
            "files": corpus.files,
            "hours_to_tokenize": corpus.hours,
            **measure(folder, corpus),
        }
    write(arguments.json, report)
    print(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
