"""`thinwire sample` with prompts, tokenizers and models that are odd."""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, normalizers

from node.cli import sample
from node.cli.main import main
from node.config.schema import DataSection, ModelSection, RunConfig
from node.data.tokenizer import BYTES
from node.state.whole_model import pick

PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "\u2581b"]
IDS = {piece: index for index, piece in enumerate(PIECES)}


def sentencepiece_style(folder: Path) -> Path:
    """A tokenizer as Llama 2's: its decoder drops the space at the beginning of a text."""
    bpe = tokenizers.Tokenizer(models.BPE(IDS, [("\u2581", "b")], unk_token="<unk>", byte_fallback=True))
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    bpe.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    folder.mkdir()
    bpe.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    return folder


@pytest.fixture
def run_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets `sample` find a run with this tokenizer whose model continues prompts by these ids."""

    def of(tokenizer: str, ids: Sequence[int] = ()) -> None:
        model = ModelSection(vocab=300, sequence=8)
        config = replace(RunConfig(), model=model, data=DataSection(tokenizer=tokenizer))

        class Model:
            def generate(self, prompt: Sequence[int], **options: Any) -> Iterator[int]:
                yield from ids

        monkeypatch.setattr(sample, "open_snapshot", lambda args: (config, 4, Path()))
        monkeypatch.setattr(sample, "load_model", lambda args: (4, Model()))

    return of


def test_a_text_goes_on_with_the_space_of_its_first_token(
    run_of: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_of(
        str(sentencepiece_style(tmp_path / "t")),
        [IDS["\u2581b"], IDS["<0xC3>"], IDS["<0xA9>"], IDS["\u2581b"]],
    )
    assert main(["sample", "run", "a b", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == " b\u00e9 b"
    assert main(["sample", "run", "a b"]) == 0
    assert capsys.readouterr().out == "a b b\u00e9 b\n"


def test_ids_beyond_the_bytes_have_no_text(run_of: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run_of(BYTES, [ord("b"), 256 + ord("x"), ord("c")])
    assert main(["sample", "run", "a"]) == 0
    assert capsys.readouterr().out == "abc\n"


def test_a_prompt_that_is_no_text_is_one_line(run_of: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run_of(BYTES)
    assert main(["sample", "run", "a", os.fsdecode(b"b\xff")]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert "UTF-8" in told


@pytest.mark.parametrize("length", [8, 9])
def test_a_prompt_longer_than_the_model_reads_is_reported(
    length: int, run_of: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run_of(BYTES)
    assert main(["sample", "run", "a", length * "b"]) == 0
    assert [record.args for record in caplog.records] == ([] if length == 8 else [(9, 8)])


def test_a_tiny_temperature_takes_the_likeliest_token() -> None:
    random = torch.Generator().manual_seed(0)
    for temperature in (5e-324, 1e-310):
        logits = torch.tensor([1.0, 80.0, 79.0])
        assert pick(logits, temperature=temperature, top_k=0, random=random) == 1
