"""A device that computes wrong is found when its node joins: plain torch takes over, or it is refused."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.blockfloat import ops as storage
from kernels.blockfloat import reference as blockfloat
from kernels.common import dispatch
from node.config.schema import PipelineSection, RunConfig, StorageSection, TrainingSection
from node.stage import self_test
from node.stage.self_test import checks_of, failing_parts, golden, prepared, words_of
from tests.support.cases import each
from wire.codecs import tah
from wire.codecs.formats import codec_format, codec_names
from wire.errors import RunError

CPU = torch.device("cpu")
CONFIG = RunConfig(
    pipeline=PipelineSection(forward_codec="tah", backward_codec="fixed-4"),
    training=TrainingSection(precision="bfloat16", optimizer="muon", gradients="fp8", moments="fp8"),
    storage=StorageSection(preset="agoq"),
)


@pytest.fixture(autouse=True)
def nothing_is_withdrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_withdrawn", set[str]())
    monkeypatch.setenv("THINWIRE_PLAIN", "")


@pytest.mark.timeout(300)  # The CPU's loops may have to be compiled.
@each("name", sorted({codec_format(name).golden[0] for name in (*codec_names(), "aqsgd-4")} - {""}))
def test_golden_digests_are_those_of_the_cpus_codecs(name: str) -> None:
    assert golden(name, CPU) == codec_format(name).golden[1]
    assert codec_format(name).golden[0] == name and codec_format(name).KERNELS in dispatch.PARTS


def test_what_a_run_uses_is_checked_and_passes_on_a_cpu() -> None:
    checks = checks_of(CONFIG)
    codecs = {"codec tah", "codec fixed-4"}
    assert codecs | {"storage in 4 bits", "storage in 16 bits", "gradients in FP8", "muon"} < set(checks)
    assert failing_parts(checks, CPU) == []


def pretend_kernels(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """The CPU takes `part` for what has kernels, until it is withdrawn."""
    monkeypatch.setattr(
        dispatch, "has_kernels", lambda device, of="": of == part and of not in dispatch._withdrawn
    )


def test_a_kernel_that_stores_zeros_is_withdrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU does that the compiler does not know well: it writes nothing and reports no error."""
    right = blockfloat.pack

    def packed(x: Tensor, bits: int) -> Tensor:
        made = right(x, bits)
        return torch.zeros_like(made) if dispatch.has_kernels(x.device, "storage") else made

    checks = checks_of(CONFIG)
    pretend_kernels(monkeypatch, "storage")
    monkeypatch.setattr(storage, "store", packed)
    monkeypatch.setattr(storage, "restore", blockfloat.unpack)
    assert failing_parts(checks, CPU) == ["storage"]
    assert not dispatch.has_kernels(CPU, "storage")
    assert "storage" in words_of(["storage"]) and words_of([]) == ""


def test_a_codec_that_is_wrong_without_kernels_too_refuses_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tah.TahCodec, "_unpack", lambda self, payload, out, exponent: out.zero_())
    with pytest.raises(RunError, match="codec tah"):
        failing_parts(checks_of(CONFIG), CPU)


def test_results_are_kept_until_the_driver_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, runs, device = tmp_path / "at" / "self_test.json", list[int](), torch.device("mps")

    def failing(checks: dict[str, object], device: torch.device) -> list[str]:
        runs.append(1)
        return ["fixed"]

    monkeypatch.setattr(self_test, "failing_parts", failing)
    assert prepared(CONFIG, device, kept) == ("fixed",)
    assert prepared(CONFIG, device, kept) == ("fixed",) and len(runs) == 1
    assert "fixed" in dispatch._withdrawn
    driver = tmp_path / "driver"
    driver.write_text("NVRM version: 1")
    monkeypatch.setattr(self_test, "_DRIVERS", (driver,))
    monkeypatch.setenv("THINWIRE_PLAIN", "")
    prepared(CONFIG, device, kept)
    assert len(runs) == 2 and len(json.loads(kept.read_text())) == 2
    kept.write_text('{"x": ["rm -rf"]}')
    prepared(CONFIG, device, kept)
    assert len(runs) == 3
    assert prepared(CONFIG, CPU, kept) == () and len(runs) == 3
