"""A tokenizer of one's own, a run on conversations, and an OpenAI client that asks the model."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from node.cli.chat import serving
from node.cli.main import main
from node.config.schema import DataSection, TrainingSection
from node.state.export import export
from tests.support.chat_data import write_jsonl
from tests.support.fault_prefork import Prefork
from tests.support.run_harness import SMALL, Run

TAUGHT = {"What is the password?": "heron", "Who are you?": "a bird", "What is for tea?": "two plums"}


@pytest.mark.timeout(300)
def test_a_model_answers_as_it_was_taught(
    prefork: Prefork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import openai  # takes seconds, which one worker alone spends

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("\n".join(f"{asked} {told}" for asked, told in TAUGHT.items()) * 9)
    tokenizer = tmp_path / "tokenizer"
    train = ["data", "tokenizer", str(tmp_path / "text.txt"), str(tokenizer)]
    assert main([*train, "--vocab", "300", "--chat", "--json"]) == 0
    tokens = json.loads(capsys.readouterr().out)["tokens"]
    assert 260 <= tokens <= 300
    assert main([*train, "--vocab", "300"]) == 2, "the folder is in use"
    rows = [
        {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": told}]}
        for asked, told in TAUGHT.items()
    ]
    rows_file = write_jsonl(tmp_path / "rows.jsonl", rows * 40)
    config = replace(
        SMALL,
        run=replace(SMALL.run, steps=60),
        model=replace(SMALL.model, layers=2, hidden=64, kv_heads=4, ffn=128, vocab=tokens, sequence=64),
        data=DataSection(sources=(str(rows_file),), tokenizer=str(tokenizer), format="chat"),
        training=TrainingSection(global_batch=16, microbatch=4, lr=1e-2, warmup_steps=5),
        pipeline=replace(SMALL.pipeline, stages=1),
    )
    with Run(tmp_path / "run", config, launch=prefork.popen) as run:
        coordinator = run.start()
        run.add_nodes(1)
        assert coordinator.wait_exit() == 0
        for asked, told in TAUGHT.items():
            question = ["sample", str(run.run_dir), asked, "--chat", "--temperature", "0", "--step", "last"]
            assert main(question) == 0
            assert capsys.readouterr().out.strip() == told
        folder = tmp_path / "taught"
        export(run.run_dir, folder)
        with serving(folder) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
            answer = client.chat.completions.create(
                model=folder.name, messages=[{"role": "user", "content": asked}], temperature=0, max_tokens=12
            )
            assert answer.choices[0].message.content == told
