"""Conversations: the tokens and the mask of transformers, and a loss on the assistant's tokens alone."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet
import pytest
import tokenizers
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from node.config.schema import (
    DataSection,
    ModelSection,
    PipelineSection,
    RunConfig,
    RunSection,
    TrainingSection,
)
from node.data import templates
from node.data.chat import Marker, chat_encoder, load_chat_encoder, marker_template
from node.data.conversations import Dropped, Forms, normalized
from node.data.documents import list_source, read_rows
from node.data.samples import held_out_samples
from node.data.shards import ShardedCorpus, load_data
from node.data.templates import ChatTemplate
from node.model.chunk import build_chunk
from node.model.labels import IGNORED, label_weight
from node.model.units import parameter_specs, unit_names
from node.stage.stage_model import StageModel
from tests.support.chat_data import MARKED, TEMPLATE, conversations, write_jsonl, write_tokenizer
from tests.support.chat_families import BEGIN, END, FAMILIES, template_of, write_tokenizer_of
from tests.support.examples import examples
from tests.support.huggingface import hf_model, hf_name
from tests.support.reference_trainer import ReferenceTrainer
from wire.errors import DataError

if TYPE_CHECKING:
    import transformers

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def chat_config(tmp_path: Path, template: str = TEMPLATE) -> RunConfig:
    tokenizer = write_tokenizer(tmp_path / "tokenizer", template)
    path = write_jsonl(tmp_path / "chat.jsonl", conversations(60))
    return RunConfig(
        run=RunSection(steps=4, seed=3),
        model=ModelSection(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=400, sequence=32),
        data=DataSection(path=str(path), tokenizer=str(tokenizer), format="chat"),
        training=TrainingSection(global_batch=8, microbatch=2, warmup_steps=0),
        pipeline=PipelineSection(stages=2),
    )


def corpus_of(config: RunConfig) -> ShardedCorpus:
    corpus = load_data(config)
    assert isinstance(corpus, ShardedCorpus)
    return corpus


@pytest.mark.parametrize("row", conversations(6), ids=range(6))
def test_tokens_and_mask_are_those_of_transformers(tmp_path: Path, row: dict[str, object]) -> None:
    import transformers  # takes seconds, which only some workers spend

    folder = write_tokenizer(tmp_path / "marked", MARKED)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), chat_template=MARKED
    )
    expected = theirs.apply_chat_template(
        row["messages"], return_dict=True, return_assistant_tokens_mask=True, tokenize=True
    )
    ids, mask = load_chat_encoder(str(folder), "").encode(row, "here")
    assert ids.tolist() == expected["input_ids"]
    assert mask.astype(int).tolist() == expected["assistant_masks"]


@pytest.mark.parametrize(("sequence", "reported"), [(16, True), (256, False)])
def test_conversations_that_do_not_fit_a_sample_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, sequence: int, reported: bool
) -> None:
    config = chat_config(tmp_path)
    corpus_of(replace(config, model=replace(config.model, sequence=sequence)))
    assert (
        f"60 conversations of {config.data.path} have more than model.sequence" in caplog.text
    ) == reported


def test_a_question_is_encoded_up_to_the_answer(tmp_path: Path) -> None:
    import transformers

    folder = write_tokenizer(tmp_path / "plain", TEMPLATE)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), chat_template=TEMPLATE
    )
    messages = [{"role": "user", "content": "why is the river blue?"}]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert load_chat_encoder(str(folder), "").question("why is the river blue?") == expected
    refusing = write_tokenizer(tmp_path / "refusing", "{{ raise_exception('no system message') }}")
    with pytest.raises(DataError, match="no system"):
        load_chat_encoder(str(refusing), "").question("why?")
    # Roles and contents have the form that the template reads, as in training.
    parts = write_tokenizer(
        tmp_path / "parts",
        "{% for m in messages %}{{ 'U:' if m.role == 'human' else m.role }}{% for part in m.content %}"
        "{{ part.text }}{% endfor %}{% endfor %}",
    )
    asked = load_chat_encoder(str(parts), "").question("why?", "Be kind.")
    assert tokenizers.Tokenizer.from_file(f"{parts}/tokenizer.json").decode(asked) == "systemBe kind.U:why?"


def _answer(family: str, message: dict[str, Any], *, last: bool) -> str:
    """What the template writes for an answer, its end included."""
    content = message["content"]
    if family in ("llama3", "gemma3", "mistral"):
        content = content.strip()
    if family == "qwen3":
        thought, marked, rest = content.rpartition("</think>")
        content = rest.lstrip("\n") if marked else content
        thought = thought.removeprefix("<think>").strip("\n")
        content = f"<think>\n{thought}\n</think>\n\n{content.lstrip(chr(10))}" if last else content
    calls = [call["function"] for call in message.get("tool_calls", ())]
    written = [json.dumps(call["arguments"], ensure_ascii=False) for call in calls]
    if calls and family in ("chatml", "qwen3"):
        content = "\n".join(
            f'<tool_call>\n{{"name": "{call["name"]}", "arguments": {text}}}\n</tool_call>'
            for call, text in zip(calls, written, strict=True)
        )
    elif calls and family == "llama3":
        content = f'{{"name": "{calls[0]["name"]}", "parameters": {written[0]}}}'
    elif calls:
        (made,) = message["tool_calls"]
        content = f'[TOOL_CALLS] [{json.dumps(calls[0], ensure_ascii=False)[:-1]}, "id": "{made["id"]}"}}]'
    elif family == "mistral":
        content = f" {content}"
    return content + END[family] + ("" if family in ("llama3", "mistral") else "\n")


asked = st.text("uvwxyz {}?\n\u4e2d", min_size=1, max_size=12).map(lambda text: f"Q{text}Q")
said = st.text("abc .'\n\u00e9\U0001f600", min_size=1, max_size=12).filter(str.strip)
thoughtful = st.tuples(st.text("abc \n", max_size=6), said).map(
    lambda pair: f"<think>\n{pair[0]}\n</think>\n\n{pair[1]}"
)
argument = st.dictionaries(
    st.text("abc", min_size=1, max_size=3), st.one_of(st.integers(-9, 9), said), max_size=2
)


@st.composite
def talks(draw: st.DrawFn, *, tools: bool) -> dict[str, Any]:
    """Rows with `messages`, and perhaps `tools`."""
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    row: dict[str, Any] = {"messages": []}
    messages = row["messages"]
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(asked)})
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(asked)})
        for number in range(draw(st.integers(0, 2)) if tools else 0):
            row["tools"] = [tool]
            identity = f"abcdefgh{number}"
            function = {"name": "weather", "arguments": draw(argument)}
            call = {"id": identity, "type": "function", "function": function}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            result = {"role": "tool", "name": "weather", "tool_call_id": identity, "content": draw(asked)}
            messages.append(result)
        messages.append({"role": "assistant", "content": draw(st.one_of(said, thoughtful))})
    return row


def _disguised(row: dict[str, Any]) -> dict[str, Any]:
    """The same row as Arrow and other programs hand it out."""
    messages = []
    for message in row["messages"]:
        text = json.dumps(message)
        changed = {"function_call": None, "tool_calls": None, **json.loads(text)}
        for call in changed["tool_calls"] or ():
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        changed["from"] = {"user": "human", "assistant": "gpt"}.get(changed.pop("role"), message["role"])
        changed["value"] = [{"type": "text", "text": changed.pop("content"), "image_url": None}]
        messages.append(changed)
    return {"conversations": messages, "tools": json.dumps(row["tools"]) if "tools" in row else None}


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_transformers_and_labels_the_answers(tmp_path: Path, family: str) -> None:
    """Through templates that trim, that rewrite earlier turns, and that move tools and system prompts."""
    import transformers

    folder = write_tokenizer_of(tmp_path / family, family)
    encoder = load_chat_encoder(str(folder), "")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        chat_template=template_of(family),
        eos_token=END[family],
        bos_token=BEGIN.get(family),
    )
    assert encoder.turn_ends == {theirs.convert_tokens_to_ids(END[family])}

    @settings(max_examples=examples(25), deadline=None)
    @given(row=talks(tools=family != "gemma3"), silent=st.booleans())
    def check(row: dict[str, Any], silent: bool) -> None:
        messages = row["messages"]
        asks = [message["content"] for message in messages if message["role"] == "user"]
        # It compares questions with the last one: where two are the same, the row is left out.
        assume(family != "mistral" or "tools" not in row or len({*asks}) == len(asks))
        expected = theirs.apply_chat_template(messages, tools=row.get("tools"), return_dict=True)["input_ids"]
        ids, mask = encoder.encode(row, "here")
        assert ids.tolist() == expected
        hidden_ids, hidden_mask = encoder.encode(_disguised(row), "here")
        assert hidden_ids.tolist() == expected and (hidden_mask == mask).all()
        said = [message for message in messages if message["role"] == "assistant"]
        answers = [_answer(family, message, last=message is said[-1]) for message in said]
        assert _labelled(theirs, ids, mask) == answers
        if silent and len(said) > 1:
            said[0]["weight"] = 0
            assert _labelled(theirs, *encoder.encode(row, "here")) == answers[1:]

    check()


def transformers_tokenizer(folder: Path) -> Any:
    import transformers

    return transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))


def _labelled(tables: Any, ids: np.ndarray, mask: np.ndarray) -> list[str]:
    """The text of each run of labels."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return [tables.decode(ids[start:stop]) for start, stop in edges.reshape(-1, 2)]


def test_rows_of_text_have_labels_behind_their_marker(tmp_path: Path) -> None:
    """No template is needed; the end of the text is learned too, and added once."""
    folder = write_tokenizer(tmp_path / "plain", "")
    data = DataSection(tokenizer=str(folder), format="chat", response_marker="### Response:\n")
    encoder = chat_encoder(data)
    tables = transformers_tokenizer(folder)
    text = "### Instruction:\nwhy?\n\n### Response:\nbecause"
    for row in ({"text": text}, {"text": text + "<|im_end|>"}):
        ids, mask = encoder.encode(row, "here")
        assert tables.decode(ids) == text + "<|im_end|>"
        assert tables.decode(ids[mask]) == "because<|im_end|>"
    assert tables.decode(encoder.question("why?\n")) == "why?\n### Response:\n"
    assert encoder.question(text[: -len("because")]) == encoder.encode({"text": text}, "")[0][~mask].tolist()
    for row in ({"text": "no marker"}, {"text": "### Response:\n "}, {"text": None}):
        with pytest.raises(Dropped):
            encoder.encode(row, "here")
    with pytest.raises(DataError, match="jsonl_field"):
        encoder.encode({"body": text}, "here")
    other = chat_encoder(replace(data, response_marker="### Answer:"))
    assert other.fingerprint != encoder.fingerprint


def test_rows_of_text_begin_as_the_tokenizers_texts_do(tmp_path: Path) -> None:
    """As Llama's and Gemma's do. The template in an export must write the same."""
    folder = write_tokenizer(tmp_path / "t", "")
    bpe = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    begin = "<|endoftext|>"
    bpe.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, bpe.token_to_id(begin))]
    )
    bpe.save(str(folder / "tokenizer.json"))
    data = DataSection(tokenizer=str(folder), format="chat", response_marker="Answer:")
    encoder, tables = chat_encoder(data), transformers_tokenizer(folder)
    for text in ("why?Answer: so", f"{begin}why?Answer: so"):
        ids, mask = encoder.encode({"text": text}, "here")
        assert tables.decode(ids) == f"{begin}why?Answer: so<|im_end|>" and not mask[0]
    assert tables.decode(encoder.question("why?")) == f"{begin}why?Answer:"
    template = ChatTemplate(marker_template("Answer:", begin), {"eos_token": "<|im_end|>"}, "here")
    assert template.prompt([{"role": "user", "content": "why?"}]) == f"{begin}why?Answer:"


def test_a_token_with_white_space_before_an_answer_is_a_label(tmp_path: Path) -> None:
    """As byte-pair tables make one of a space and the word behind it."""
    folder = write_tokenizer(tmp_path / "t", "")
    tables = transformers_tokenizer(folder)
    data = DataSection(tokenizer=str(folder), format="chat", response_marker="Answer: ")
    word = next(word[1:] for word in sorted(tables.get_vocab()) if word[0] == "Ġ" and word[1:].isalpha())
    ids, mask = chat_encoder(data).encode({"text": f"Question: why?\nAnswer: {word}"}, "here")
    assert tables.decode(ids[mask]) == f" {word}<|im_end|>"


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_questions_and_answers_in_files_are_conversations(tmp_path: Path, suffix: str) -> None:
    config = chat_config(tmp_path)
    talks = [row["messages"][-2:] for row in conversations(40)]
    pairs = [{"instruction": a["content"], "input": "", "output": b["content"], "id": 7} for a, b in talks]
    marked = [{"text": f"{a['content']}\n# {b['content']}"} for a, b in talks]
    for rows, keys in ((pairs, {}), (marked, {"response_marker": "\n# "})):
        path = tmp_path / f"rows.{suffix}"
        if suffix == "jsonl":
            write_jsonl(path, rows)
        else:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        corpus = corpus_of(replace(config, data=replace(config.data, path=str(path), **keys)))
        ids, mask = corpus.streams[0].window(0)
        assert mask is not None and 0 < np.count_nonzero(mask) < len(ids)
        assert sum(one.documents for one in corpus.streams[0].counts()) > 0
        corpus.close()


def test_a_template_that_rewrites_earlier_turns_drops_what_it_cannot_mask(tmp_path: Path) -> None:
    last_only = "{% for m in messages %}{{ m.role + (m.content if loop.last else '') }}{% endfor %}"
    encoder = load_chat_encoder(str(write_tokenizer(tmp_path / "t", last_only)), "")
    with pytest.raises(Dropped, match="rewrites earlier messages"):
        encoder.encode(conversations(2)[1], "here")


LOOPS = "{% for a in range(99999) %}" * 4 + "{% endfor %}" * 4


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for %}", "cannot be read"),
        ("{{ ''.__class__.__mro__ }}", "refuses it"),
        ("{{ 1 / 0 }}", "refuses it: division by zero"),
        ("{{ range(10 ** 9) | list }}", "refuses it: Range too big"),
        ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "calls itself without end"),
        (LOOPS, "takes more than 0.5 s"),
        ("{{ lipsum(n=10 ** 8) }}", "takes more than 0.5 s"),
        ("{{ 'a' * 10 ** 11 }}", "takes more than 2 GiB"),
        ("{% for a in range(99999) %}{{ 'a' * 99999 }}{% endfor %}", "writes more than"),
        ("{{ 'http://a.b ' * 50000 }}", "writes more than 262,144 characters"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "nested too deeply"),
    ],
    ids=[
        "syntax",
        "sandbox",
        "zero",
        "range",
        "recursion",
        "loops",
        "text",
        "memory",
        "output",
        "growth",
        "deep",
    ],
)
def test_bad_templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str, words: str) -> None:
    if "0.5 s" in words:  # which a process may take to start, so that nothing else has this limit
        monkeypatch.setattr(templates, "LIMIT_SECONDS", 0.5)
    folder = write_tokenizer(tmp_path / "t", template)
    with pytest.raises((DataError, Dropped), match=words):
        load_chat_encoder(str(folder), "").encode(conversations(1)[0], "here")


def test_characters_that_no_text_has_are_one_error(tmp_path: Path) -> None:
    """Half of a pair, in a template's source or by its rules."""
    for template in ("\ud800{{ messages[0].content }}", "{{ '\\ud800' }}{{ messages[0].content }}"):
        encoder = load_chat_encoder(str(write_tokenizer(tmp_path / "t", template)), "")
        with pytest.raises((DataError, Dropped)):
            encoder.encode(conversations(1)[0], "here")


WITH_TOOLS = "{{ tools | tojson }}" + TEMPLATE


@pytest.mark.parametrize("form", ["list", "map", "files"])
def test_conversations_with_tools_have_the_template_that_transformers_takes(
    tmp_path: Path, form: str
) -> None:
    import transformers

    folder = write_tokenizer(tmp_path / "t")
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    named = {"default": TEMPLATE, "tool_use": WITH_TOOLS}
    if form == "files":
        (folder / "chat_template.jinja").write_text(TEMPLATE)
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(WITH_TOOLS)
    else:
        listed = [{"name": name, "template": template} for name, template in named.items()]
        settings["chat_template"] = listed if form == "list" else named
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    encoder = load_chat_encoder(str(folder), "")
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    inside = [{**messages[0], "tools": tools}, messages[1]]
    rows = [{"messages": messages}, {"messages": messages, "tools": tools}, {"messages": messages}]
    expected = [
        theirs.apply_chat_template(messages, tools=row.get("tools"), return_dict=True)["input_ids"]
        for row in rows
    ]
    assert expected[0] != expected[1]
    assert [encoder.encode(row, "here")[0].tolist() for row in rows] == expected
    found = encoder.encode_all([("here", row) for row in rows])
    assert [ids.tolist() for ids, _ in found] == expected
    assert encoder.encode({"messages": inside}, "here")[0].tolist() == expected[1]
    (tmp_path / "own.jinja").write_text(TEMPLATE)
    own = load_chat_encoder(str(folder), str(tmp_path / "own.jinja"))
    assert own.encode(rows[1], "here")[0].tolist() == expected[0]
    assert own.fingerprint != encoder.fingerprint


@pytest.mark.parametrize("key", ["extra_special_tokens", "model_specific_special_tokens"])
def test_a_template_knows_the_models_own_tokens_by_their_names(tmp_path: Path, key: str) -> None:
    import transformers

    folder = write_tokenizer(tmp_path / "t")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    template = "{{ image_token }}" + TEMPLATE
    named = {**settings, key: {"image_token": "<|image|>"}, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    expected = theirs.apply_chat_template(messages, return_dict=True)["input_ids"]
    ids, _ = load_chat_encoder(str(folder), "").encode({"messages": messages}, "here")
    assert ids.tolist() == expected and expected[0] == theirs.convert_tokens_to_ids("<|image|>")


def test_answers_that_end_with_no_token_of_the_tokenizer_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_tokenizer(tmp_path / "t", TEMPLATE)
    data = DataSection(format="chat", tokenizer=str(folder))
    for end, reported in (("<|im_end|>", False), (" <|im_end|>", False), ("<|eot|>", True)):
        template = TEMPLATE.replace("<|im_end|>", end)
        (tmp_path / "own.jinja").write_text(template)
        encoder = chat_encoder(replace(data, chat_template=str(tmp_path / "own.jinja")))
        assert bool(encoder.turn_ends) != reported
        assert ("<|eot|>" in caplog.text) == reported


def test_a_null_argument_that_is_left_out_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}{{ m.content }}{{ (m.tool_calls or []) | tojson }}{% endfor %}"
    )
    encoder = load_chat_encoder(str(write_tokenizer(tmp_path / "t", template)), "")
    call = {"function": {"name": "f", "arguments": {"a": 1, "b": None}}}
    asked = {"role": "user", "content": "a"}
    row = {"messages": [asked, {"role": "assistant", "tool_calls": [call]}]}
    for _ in range(2):
        ids, _ = encoder.encode(row, "here")
    assert caplog.text.count("calls have null as an argument, which is left out") == 1
    assert len(ids) > 0


def test_a_label_that_may_reject_an_answer_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    encoder = load_chat_encoder(str(write_tokenizer(tmp_path / "t", TEMPLATE)), "")
    row = {"instruction": "a", "output": "b"}
    encoder.encode({**row, "label": 1}, "here")
    assert not caplog.records
    _, mask = encoder.encode({**row, "label": 0}, "here")
    assert mask.any() and "false instead of 0" in caplog.text


@pytest.mark.timeout(20)
def test_special_tokens_in_the_content_of_messages_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = str(write_tokenizer(tmp_path / "t", TEMPLATE))
    for end, reported in (("", False), ("<|im_end|>", True)):
        row = {"instruction": "a", "output": f"b{end}"}
        list(load_chat_encoder(folder, "").encode_all([("here", row)]))
        assert ("messages have <|im_end|> in their content" in caplog.text) == reported
    caplog.clear()
    marked = {"text": "<|im_start|>a->b"}
    list(load_chat_encoder(folder, "", Marker("->", "text")).encode_all([("here", marked)]))
    assert not caplog.records


def test_a_tag_that_messages_begin_with_and_the_template_writes_too_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As Hermes data has results of tools for templates that put no tags around them."""
    wrapped = TEMPLATE.replace("message['content']", "'<tool_response>\n' + message['content']")
    for template, tag, reported in (
        (TEMPLATE, "<tool_response>", False),
        (wrapped, "<other>", False),
        (wrapped, "<tool_response>", True),
    ):
        folder = write_tokenizer(tmp_path / f"{tag}{len(template)}", template)
        row = {"instruction": f"{tag}\n7", "output": "b <b><b>"}
        list(load_chat_encoder(str(folder), "").encode_all([("here", row)]))
        assert (f"begin with {tag}" in caplog.text) == reported


def test_a_tables_mask_of_its_messages_is_read(tmp_path: Path) -> None:
    messages = [{"role": role, "content": role} for role in ("user", "assistant")] * 2
    path = tmp_path / "rows.parquet"
    table = pyarrow.table({"messages": [messages], "loss_mask": [[0, 0, 0, 1]], "mask": ["User"]})
    pyarrow.parquet.write_table(table, path)
    data = DataSection(format="chat", path=str(path))
    [(_, row)] = read_rows(list_source(str(path)).shards[0], data, skips=False)
    assert isinstance(row, dict) and normalized(row, "here", Forms()).trained == (3,)
    assert row["mask"] == "User"


@pytest.mark.parametrize(("role", "reports"), [("narrator", 1), ("Customer", 0), ("tool", 0), ("critic", 0)])
def test_a_role_that_nobody_knows_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, role: str, reports: int
) -> None:
    template = TEMPLATE + "{% if messages[0].role == 'critic' %}!{% endif %}"
    encoder = load_chat_encoder(str(write_tokenizer(tmp_path / "plain", template)), "")
    said = [("user", "Hi."), ("assistant", "Hello."), (role, "So."), ("assistant", "Yes.")]
    row = {"messages": [{"role": name, "content": content} for name, content in said]}
    for _ in range(2):
        encoder.encode(row, "here")
    assert len(caplog.records) == reports


def test_marks_that_ask_for_labels_on_what_others_wrote_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    encoder = load_chat_encoder(str(write_tokenizer(tmp_path / "t")), "")
    asked, answered = {"role": "user", "content": "So?"}, {"role": "assistant", "content": "Yes."}
    encoder.encode({"messages": [{**asked, "train": False}, {**answered, "train": True}]}, "here")
    assert not caplog.records
    encoder.encode({"messages": [{**asked, "train": True}, answered]}, "here")
    assert "marked to be trained on" in caplog.text


def test_reasoning_that_the_template_leaves_out_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_tokenizer(tmp_path / "t", TEMPLATE)
    cut = TEMPLATE.replace("message['content']", "message['content'].split('</think>')[-1]")
    cut_earlier = TEMPLATE.replace(
        "message['content']",
        "(message['content'] if loop.last else message['content'].split('</think>')[-1])",
    )
    thought = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nYes."}
    earlier = {"role": "assistant", "content": "<think>Well.</think>No."}
    reasoned = {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    empty = {"role": "assistant", "content": "<think>\n\n</think>\n\nYes."}
    asked, no = {"role": "user", "content": "So?"}, {"role": "assistant", "content": "No."}
    cases: list[tuple[str, list[dict[str, Any]], str]] = [
        (TEMPLATE, [asked, no, asked, thought], ""),
        (cut, [asked, no, asked, thought], "of answers"),
        (TEMPLATE, [asked, no, asked, reasoned], "of answers"),
        (cut, [asked, no, asked, asked], ""),
        (cut, [asked, empty], ""),
        # The model would learn to answer without thinking, as Qwen3's template has it.
        (cut_earlier, [asked, earlier, asked, thought], "of earlier answers"),
        (cut_earlier, [asked, {**earlier, "train": False}, asked, thought], ""),
    ]
    for number, (template, messages, reported) in enumerate(cases):
        (tmp_path / f"{number}").mkdir()
        own = shutil.copytree(folder, tmp_path / f"{number}" / "t")
        (own / "chat_template.jinja").write_text(template)
        caplog.clear()
        load_chat_encoder(str(own), "").encode({"messages": messages}, "here")
        lines = [line.getMessage() for line in caplog.records if "the reasoning" in line.getMessage()]
        assert len(lines) == bool(reported) and all(f"the reasoning {reported}" in line for line in lines)


def test_a_tokenizer_without_a_template_is_refused(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "t")
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(DataError, match="no chat template: set"):
        load_chat_encoder(str(folder), "")
    named = {"chat_template": [{"name": "rag", "template": TEMPLATE}]}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    with pytest.raises(DataError, match="no chat template named default, only rag: set"):
        load_chat_encoder(str(folder), "")
    (tmp_path / "own.jinja").write_text(TEMPLATE)
    assert load_chat_encoder(str(folder), str(tmp_path / "own.jinja"))
    for value in (TEMPLATE, {"chat_template": TEMPLATE}):  # its braces and newlines would be trained on
        (tmp_path / "chat_template.json").write_text(json.dumps(value))
        with pytest.raises(DataError, match="is JSON"):
            load_chat_encoder(str(folder), str(tmp_path / "chat_template.json"))


def test_labels_hold_the_assistants_tokens_alone(tmp_path: Path) -> None:
    config = chat_config(tmp_path)
    corpus = corpus_of(config)
    folder = Path(config.data.tokenizer)
    encoder = load_chat_encoder(str(folder), "")
    written = [encoder.encode(row, "") for row in conversations(60)]
    user = {int(token) for ids, mask in written for token in ids[~mask]}
    assistant = {int(token) for ids, mask in written for token in ids[mask]}
    labels = np.concatenate([corpus.labels(step) for step in range(4)])
    batch = np.concatenate([corpus.batch(step) for step in range(4)])
    corpus.close()
    counted = labels != IGNORED
    assert set(labels[counted].tolist()) <= assistant and user - assistant
    assert not set(labels[counted].tolist()) & (user - assistant)
    assert (labels[counted] == batch[:, 1:][counted]).all() and 0 < counted.mean() < 1


def test_the_loss_is_that_of_transformers(tmp_path: Path) -> None:
    """Over all microbatches of a step, whose numbers of labels differ; gradients too."""
    config = chat_config(tmp_path)
    corpus = corpus_of(config)
    inputs, labels = corpus.inputs(0), corpus.labels(0)
    per_microbatch = (labels != IGNORED).reshape(4, -1).sum(1)
    assert len(set(per_microbatch.tolist())) > 1, "an average of averages would be another loss"

    theirs = llama_of(config)
    result = theirs(input_ids=torch.from_numpy(inputs)).logits
    expected = torch.nn.functional.cross_entropy(
        result.flatten(0, 1), torch.from_numpy(labels).flatten(), ignore_index=-100
    )
    expected.backward()

    reference = ReferenceTrainer(config, corpus)
    loss = reference.accumulate()
    assert loss == pytest.approx(expected.item(), abs=1e-5)

    stage = StageModel(config, CPU)
    stage.build(0, 1)
    stage.begin_step(label_weight(labels))
    total = 0.0
    for index in range(4):
        rows = slice(2 * index, 2 * index + 2)
        share = stage.forward(0, index, torch.from_numpy(inputs[rows]), torch.from_numpy(labels[rows]))
        stage.backward(0, index, None)
        total += share.item()
    assert total == pytest.approx(expected.item(), abs=1e-5)
    stage.finish_step()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for unit, ours in stage.squared_norms().items():
        names = [hf_name(config.model, unit, spec.name) for spec in parameter_specs(config.model, unit)]
        want = sum(float(gradients[name].double().square().sum()) for name in names)
        assert ours == pytest.approx(want, rel=1e-4)
    corpus.close()


def test_a_step_without_labels_has_no_loss_and_no_gradient(tmp_path: Path) -> None:
    config = chat_config(tmp_path)
    stage = StageModel(config, CPU)
    stage.build(0, 1)
    nothing = np.full((8, 32), IGNORED, dtype=np.int64)
    stage.begin_step(label_weight(nothing))
    share = stage.forward(0, 0, torch.zeros(2, 32, dtype=torch.int64), torch.from_numpy(nothing[:2]))
    stage.backward(0, 0, None)
    assert share.item() == 0.0 and sum(stage.squared_norms().values()) == 0.0


def test_text_has_the_same_bits_with_and_without_the_mask(tmp_path: Path) -> None:
    """Where every token counts the weight is 1; the unmasked path does not know of it."""
    config = replace(chat_config(tmp_path), data=DataSection())
    labels = np.arange(8 * 32).reshape(8, 32) % 256
    losses = []
    for weight in (1.0, label_weight(labels)):
        stage = StageModel(config, CPU)
        stage.build(0, 1)
        stage.begin_step(weight)
        tokens = torch.from_numpy(labels[:2])
        losses.append(stage.forward(0, 0, tokens, tokens).item())
    assert label_weight(labels) == 1.0 and losses[0] == losses[1]


def llama_of(config: RunConfig) -> "transformers.LlamaForCausalLM":
    """transformers' model with the run's initial weights."""
    model = config.model
    theirs: transformers.LlamaForCausalLM = hf_model(model)
    theirs.set_attn_implementation("eager")
    chunk = build_chunk(model, unit_names(model), config.run.seed, CPU)
    state = {
        hf_name(model, unit, name): parameter.detach().clone()
        for unit, parameters in chunk.named_units()
        for name, parameter in parameters.items()
    }
    theirs.load_state_dict(state, strict=True)
    return theirs.train()


def test_the_preview_marks_labels_and_counts_what_is_dropped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from node.cli.main import main
    from node.run_file.loader import to_toml

    config = chat_config(tmp_path)
    rows = [*conversations(60), {"messages": [{"role": "user", "content": "nobody answers"}]}]
    write_jsonl(tmp_path / "chat.jsonl", rows)
    (tmp_path / "run.toml").write_text(to_toml(config))
    assert main(["data", "preview", str(tmp_path / "run.toml"), "--json"]) == 0
    (source,) = json.loads(capsys.readouterr().out)["sources"]
    assert source["documents"] == 61 and source["dropped"] == {"no assistant message": 1}
    assert 0 < source["labels"] < source["tokens"] and len(source["ids"]) == len(source["mask"])
    assert main(["data", "preview", str(tmp_path / "run.toml")]) == 0
    text = capsys.readouterr().out
    assert "dropped 1: no assistant message" in text and "[[" in text
    assert all("question" not in part.partition("]]")[0] for part in text.split("[[")[1:])


def test_held_out_conversations_have_labels_and_begin_where_they_begin(tmp_path: Path) -> None:
    """Though a conversation's turns end with the same token as the conversation would."""
    config = chat_config(tmp_path)
    valid = write_jsonl(tmp_path / "valid.jsonl", conversations(30))
    data = replace(config.data, valid=str(valid), valid_every=1, valid_samples=8, separate_documents=True)
    config = replace(config, data=data)
    corpus = corpus_of(config)
    held_out = held_out_samples(config, corpus)
    with pytest.raises(DataError, match=r"data\.valid"):
        held_out_samples(replace(config, data=replace(data, valid="")), corpus)
    corpus.close()
    assert held_out.windows.shape == (8, 33)
    encoder = load_chat_encoder(data.tokenizer, "")
    ids, mask, begins = [], [], []
    for row in conversations(30):
        one, counted = encoder.encode(row, "")
        begins.append(len(ids))
        ids += [*one, 0]  # the end of text that stands between them
        mask += [*counted, False]
    tokens = held_out.windows
    assert tokens[:, :-1].flatten().tolist() == ids[: 8 * 32]
    labels = [token if counts else IGNORED for token, counts in zip(ids, mask, strict=True)]
    assert held_out.labels.flatten().tolist() == labels[1 : 8 * 32 + 1]
    found = set(np.flatnonzero(held_out.documents).tolist())
    assert found == {*range(0, 8 * 32, 32), *(at for at in begins if at < 8 * 32)}


@pytest.mark.parametrize(
    ("template", "reported"),
    [
        ("{% for m in messages %}{{ m['from'] }}: {{ m['value'] }}\n{% endfor %}", True),
        ("{% for m in messages %}{{ m.role }}\n{% endfor %}", True),
        ("{% for m in messages %}{{ m.content | trim | upper }}\n{% endfor %}", False),
    ],
)
def test_a_template_that_leaves_out_answers_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, template: str, reported: bool
) -> None:
    encoder = load_chat_encoder(str(write_tokenizer(tmp_path / "tokenizer", template)), "")
    list(encoder.encode_all([(str(number), row) for number, row in enumerate(conversations(3))]))
    assert ("leaves out or changes the content of answers" in caplog.text) == reported


@pytest.mark.parametrize(
    ("condition", "role"),
    [
        ("m.role != 'system' or loop.last", "system"),  # as Mistral's, whose last message must be a question
        ("not m.tool_calls", "answers"),  # as Llama 3.1's, which writes a call alone
        ("m.role != 'tool'", ""),  # results may be written in another form
    ],
)
def test_a_template_that_leaves_out_other_messages_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, condition: str, role: str
) -> None:
    source = (
        f"{{% for m in messages %}}{{% if {condition} %}}{{{{ m.content }}}}{{% endif %}}"
        "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}\n{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How warm?"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call]},
        {"role": "tool", "content": "7"},
        {"role": "assistant", "content": "Seven."},
    ]
    encoder = load_chat_encoder(str(write_tokenizer(tmp_path / "tokenizer", source)), "")
    assert len(list(encoder.encode_all([("here", {"messages": messages})]))) == 1
    lines = [line.getMessage() for line in caplog.records if "leaves out or changes" in line.getMessage()]
    assert [role in line for line in lines] == ([True] if role else [])
