"""A run on conversations: real processes give the unsplit trainer's losses, also after a resume.

Conversations are packed, attention stays within each, and others are held out.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from node.cli.main import main
from node.config.schema import DataSection
from node.data.samples import held_out_samples
from node.data.shards import load_data
from node.telemetry.events import HeldOutLoss
from tests.support.chat_data import conversations, write_jsonl, write_tokenizer
from tests.support.fault_prefork import Prefork
from tests.support.reference_trainer import ReferenceTrainer
from tests.support.run_harness import SMALL, Run, Still


@pytest.mark.timeout(240)
def test_a_run_on_conversations_is_the_unsplit_model(
    prefork: Prefork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bit for bit, with labels masked and two sources mixed; it is stopped and resumed on the way. The
    held-out loss is that over the assistant's tokens alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    names = [str(write_jsonl(tmp_path / f"{number}.jsonl", conversations(40 + number))) for number in (0, 7)]
    config = replace(
        SMALL,
        run=replace(SMALL.run, steps=12),
        model=replace(SMALL.model, vocab=400),
        data=DataSection(
            sources=tuple(names),
            weights=(2.0, 1.0),
            tokenizer=str(tokenizer),
            format="chat",
            separate_documents=True,
            valid=str(write_jsonl(tmp_path / "held-out.jsonl", conversations(50)[40:])),
            valid_every=6,
            valid_samples=6,
        ),
        pipeline=replace(SMALL.pipeline, stages=2),
    )
    data = load_data(config)
    trainer = ReferenceTrainer(config, data)
    held_out = held_out_samples(config, data)
    assert len(held_out) == 6 and held_out.label_weight > 1.2, "most tokens of a user do not count"
    losses, expected = {}, []
    for step in range(1, 13):
        expected.append(trainer.train_step().loss)
        if step % 6 == 0:
            losses[step] = trainer.validation_loss(held_out)
    data.close()
    with Run(tmp_path / "run", config, launch=prefork.popen, still=Still(stage=0, steps=4)) as run:
        first = run.start()
        run.add_nodes(2)
        still = run.wait_still()
        first.interrupt()
        still.go_on()
        assert first.wait_exit() == 130
        second = run.resume()
        run.add_nodes(2)
        assert second.wait_exit() == 0
        assert [run.losses[step] for step in sorted(run.losses)] == expected
        assert run.weights_sha256 == trainer.weights_sha256()
        told = {one.step: one.uncompressed for one in (*first.all(HeldOutLoss), *second.all(HeldOutLoss))}
        assert told == pytest.approx(losses, abs=1e-5)
        for text in ([], ["--text", config.data.valid, "--samples", "6"]):
            assert main(["eval", str(run.run_dir), "--step", "12", "--json", *text]) == 0
            said = json.loads(capsys.readouterr().out)
            assert said["samples"] == 6 and said["loss"] == pytest.approx(losses[12], abs=1e-5)
        assert main(["sample", str(run.run_dir), "why?", "--chat", "--tokens", "4"]) == 0
        answer = capsys.readouterr().out
        assert "why?" not in answer and "<|im_start|>user" not in answer, "only the answer is shown"
