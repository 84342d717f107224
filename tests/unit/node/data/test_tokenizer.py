"""Byte-pair encoding from the user's tables, and token files on disk."""

import base64
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from node.config.schema import DataSection
from node.data import token_cache, tokenizer
from node.data.chat import load_chat_encoder
from node.data.data import Corpus
from node.data.documents import list_source, read_text
from node.data.shards import TokenizedSource
from node.data.text import SEPARATOR
from node.data.token_cache import tokens_of
from node.data.tokenizer import (
    MOST_TABLES_BYTES,
    BpeTokenizer,
    Tokenizer,
    load_tokenizer,
    of_tables,
    pieces_of,
    special_tokens,
)
from node.state.export import _written_settings
from tests.support.cases import each
from tests.support.examples import examples
from wire.errors import ConfigError, DataError

LINES = [
    f"the {word} of line {n}, isn't it? {n * n}  \u4e2d\u6587 \U0001f600"
    for n in range(60)
    for word in ("end", "start")
]
PROSE = "\n".join(LINES)


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small byte-level BPE in all the forms that people have it in."""
    folder = tmp_path_factory.mktemp("bpe")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    bpe.train_from_iterator(LINES, trainer)
    for name in ("hugging-face", "gpt2", "openai"):
        (folder / name).mkdir()
    bpe.save(str(folder / "hugging-face" / "tokenizer.json"))
    bpe.model.save(str(folder / "gpt2"))
    for theirs, ours in (("encoder.json", "vocab.json"), ("vocab.bpe", "merges.txt")):
        (folder / "openai" / theirs).write_bytes((folder / "gpt2" / ours).read_bytes())
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "thinwire" / "tokens"


def whole(bpe: Tokenizer, text: bytes) -> list[int]:
    """Every document encoded in one piece."""
    assert isinstance(bpe, BpeTokenizer)
    documents: list[bytes] = []
    for document in text.split(SEPARATOR):
        documents += [document, SEPARATOR]
    return np.concatenate(bpe.encode(documents[:-1])).tolist()


def quiet(_: str) -> None:
    pass


@pytest.mark.parametrize(
    "name",
    [
        "hugging-face",
        "hugging-face/tokenizer.json",
        "gpt2",
        "gpt2/vocab.json",
        "gpt2/merges.txt",
        "openai",
        "openai/encoder.json",
        "openai/vocab.bpe",
    ],
)
def test_every_form_gives_the_same_ids(tables: Path, name: str) -> None:
    found = load_tokenizer(str(tables / name))
    assert found.vocabulary == 400 and found.dtype == np.uint16
    (ids,) = found.encode([PROSE.encode()])
    expected = tokenizers.Tokenizer.from_file(str(tables / "hugging-face" / "tokenizer.json"))
    assert ids.tolist() == expected.encode(PROSE).ids
    assert expected.decode(ids.tolist()) == PROSE
    assert len(ids) < len(PROSE.encode()) / 2


characters = st.sampled_from([*"ab .,'s1\n\n\n\r\t\u00a0\u2028\u4e2d", "\n\n", " \n", "\n ", "x\ny", ".\n-"])
documents = st.lists(st.lists(characters, max_size=60).map("".join), min_size=1, max_size=4)


@settings(
    max_examples=examples(300),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(documents=documents, size=st.integers(1, 40))
def test_pieces_do_not_change_the_ids(
    tables: Path, monkeypatch: pytest.MonkeyPatch, documents: list[str], size: int
) -> None:
    text = SEPARATOR.join(document.encode() for document in documents)
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer, "PIECE_BYTES", size)
        pieces = list(pieces_of(text))
    assert b"".join(pieces) == text
    gpt2 = load_tokenizer(str(tables / "gpt2"))
    assert np.concatenate(gpt2.encode(pieces)).tolist() == whole(gpt2, text) if text else not pieces


def test_a_word_without_end_is_cut_between_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "PIECE_BYTES", 10)
    monkeypatch.setattr(tokenizer, "MOST_WORD_BYTES", 21)
    text = "\u4e2d".encode() * 50
    pieces = list(pieces_of(text))
    assert b"".join(pieces) == text and all(piece.decode() for piece in pieces)
    assert max(map(len, pieces)) <= 31


_REPLACE = {"type": "Replace", "pattern": {"String": "e"}, "content": "e" * 50}
_CHARSMAP = (8).to_bytes(4, "little") + bytes(8) + b"e" * 5000 + b"\0"
_A, _B = ({"Sequence": {"id": one, "type_id": 0}} for one in "AB")
_SINGLE_AND_PAIR = {"single": [{"SpecialToken": {"id": "E", "type_id": 0}}, _A], "pair": [_A, _B]}
_ENDS = {"id": "E", "ids": [0] * 5000, "tokens": ["E"] * 5000}


@pytest.mark.parametrize(
    "place,rule,says",
    [
        ("normalizer", {"type": "Sequence", "normalizers": [_REPLACE] * 6}, r"makes 1.56e\+10 characters"),
        ("decoder", {"type": "Sequence", "decoders": [_REPLACE] * 6}, r"makes 1.56e\+10 characters"),
        ("normalizer", {"type": "Prepend", "prepend": "e" * 10**5}, r"makes 1e\+05 characters"),
        (
            "normalizer",
            {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(_CHARSMAP).decode()},
            r"makes 5e\+03 characters",
        ),
        (
            "post_processor",
            {
                "type": "TemplateProcessing",
                "single": [
                    {"SpecialToken": {"id": "E", "type_id": 0}},
                    {"Sequence": {"id": "A", "type_id": 0}},
                ],
                "pair": [{"Sequence": {"id": one, "type_id": 0}} for one in "AB"],
                "special_tokens": {"E": _ENDS},
            },
            "puts 5,000 tokens",
        ),
    ],
)
def test_rules_that_let_text_grow_without_bound_are_refused(
    tables: Path, tmp_path: Path, place: str, rule: dict[str, Any], says: str
) -> None:
    with pytest.raises(DataError, match=says):
        load_tokenizer(_with_rule(tables, tmp_path, place, rule))


def _with_rule(tables: Path, folder: Path, place: str, rule: dict[str, Any]) -> str:
    rules = json.loads((tables / "hugging-face" / "tokenizer.json").read_bytes())
    (folder / "tokenizer.json").write_text(json.dumps({**rules, place: rule}))
    return str(folder)


def test_a_pattern_that_backtracks_without_end_is_one_error(tables: Path, tmp_path: Path) -> None:
    split = {"type": "Split", "pattern": {"Regex": "(a+)+b"}, "behavior": "Isolated", "invert": False}
    as_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    both = {"type": "Sequence", "pretokenizers": [split, as_bytes]}
    found = load_tokenizer(_with_rule(tables, tmp_path, "pre_tokenizer", both))
    with pytest.raises(DataError, match="cannot encode this text"):
        found.encode([b"a" * 60_000])
    with pytest.raises(DataError, match="cannot encode this text"):
        found.prompt("a" * 60_000)


def test_the_same_text_gives_the_same_ids_whatever_the_tables_say(tables: Path, tmp_path: Path) -> None:
    rules = json.loads((tables / "hugging-face" / "tokenizer.json").read_bytes())
    name = _with_rule(tables, tmp_path, "model", {**rules["model"], "dropout": 0.9})
    plain = load_tokenizer(str(tables / "hugging-face")).encode([PROSE.encode()])
    assert [ids.tolist() for ids in load_tokenizer(name).encode([PROSE.encode()])] == [plain[0].tolist()]


def test_a_first_token_that_the_tables_do_not_have_is_refused(tables: Path, tmp_path: Path) -> None:
    first = {"E": {"id": "E", "ids": [4_000_000_000], "tokens": ["E"]}}
    rule = {"type": "TemplateProcessing", **_SINGLE_AND_PAIR, "special_tokens": first}
    with pytest.raises(DataError, match="token 4000000000"):
        load_tokenizer(_with_rule(tables, tmp_path, "post_processor", rule))


def test_text_that_looks_like_a_special_token_stays_text_and_is_reported_once(
    tables: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for form, reports in (("hugging-face", 1), ("gpt2", 0)):  # GPT-2's tables alone name no special token
        found = load_tokenizer(str(tables / form))
        caplog.clear()
        for _ in range(2):
            ids = np.concatenate(found.encode([b"a<|endoftext|>b", SEPARATOR, b"c"])).tolist()
            assert ids.count(0) == 1 and len(ids) > 6
        assert caplog.text.count("<|endoftext|>") == reports


def test_tokens_are_kept_and_read_back(tables: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpt2 = load_tokenizer(str(tables / "gpt2"))
    text = SEPARATOR.join([PROSE.encode(), b"another one", PROSE.encode()])
    told: list[str] = []
    first = tokens_of(text, gpt2, cache, told.append)
    assert isinstance(first, np.memmap) and first.tolist() == whole(gpt2, text)
    assert told and told[-1].startswith("tokenized 0 of 0 MB")
    assert sorted(path.suffix for path in cache.iterdir()) == [".json", ".lock", ".tokens"]

    def fail(*_: object) -> None:
        raise AssertionError("encoded again")

    monkeypatch.setattr(BpeTokenizer, "encode", fail)
    assert tokens_of(text, gpt2, cache, fail).tolist() == first.tolist()
    with pytest.raises(AssertionError, match="encoded again"):
        tokens_of(text + b"!", gpt2, cache, quiet)


def test_a_killed_run_resumes_where_it_was(
    tables: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "PIECE_BYTES", 500)
    monkeypatch.setattr(token_cache, "BATCH_PIECES", 3)
    gpt2 = load_tokenizer(str(tables / "gpt2"))
    text = SEPARATOR.join([PROSE.encode()] * 3)
    total = len(list(pieces_of(text)))
    encoded: list[int] = []
    plain = BpeTokenizer.encode

    def dies(self: BpeTokenizer, pieces: list[bytes]) -> list[np.ndarray]:
        encoded.append(len(pieces))
        if len(encoded) == 5:
            # Some of the next batch may have reached the disk.
            (partial,) = cache.glob("*.partial")
            partial.write_bytes(partial.read_bytes() + b"torn")
            raise KeyboardInterrupt
        return plain(self, pieces)

    monkeypatch.setattr(BpeTokenizer, "encode", dies)
    with pytest.raises(KeyboardInterrupt):
        tokens_of(text, gpt2, cache, quiet)
    ids = tokens_of(text, gpt2, cache, quiet)
    assert ids.tolist() == whole(gpt2, text)
    assert sum(encoded[:4]) + sum(encoded[5:-1]) == total, "nothing was encoded twice"


@pytest.mark.parametrize("damage", ["flip", "cut", "no-record", "wrong-record", "torn-progress"])
def test_damaged_files_are_made_again(tables: Path, cache: Path, damage: str) -> None:
    gpt2 = load_tokenizer(str(tables / "gpt2"))
    text = PROSE.encode()
    expected = tokens_of(text, gpt2, cache, quiet).tolist()
    (tokens,), (record,) = cache.glob("*.tokens"), cache.glob("*.json")
    data = bytearray(tokens.read_bytes())
    if damage == "flip":
        data[10] ^= 1
        tokens.write_bytes(data)
    elif damage == "cut":
        tokens.write_bytes(data[:-1])
    elif damage == "no-record":
        record.unlink()
    elif damage == "wrong-record":
        record.write_text(json.dumps({"tokens": "many"}))
    else:
        record.unlink()
        tokens.with_suffix(".progress").write_text('{"pieces": 7, "tokens":')
        tokens.with_suffix(".partial").write_bytes(b"abc")
    assert tokens_of(text, gpt2, cache, quiet).tolist() == expected


def test_a_corpus_of_tokens(tables: Path, tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for name in ("one", "two"):
        (tmp_path / "text" / f"{name}.txt").write_text(PROSE)
    data = DataSection(path=str(tmp_path / "text"), tokenizer=str(tables / "gpt2"))
    corpus = Corpus.load(data, sequence=16, global_batch=2, seed=0, vocab=400)
    ids = [*corpus.training.tolist(), *corpus.validation.tolist()]
    assert ids == whole(load_tokenizer(data.tokenizer), read_text(data))
    assert corpus.batch(3).shape == (2, 17) and corpus.batch(3).max() < 400
    as_bytes = Corpus.load(DataSection(path=data.path), sequence=16, global_batch=2, seed=0)
    assert corpus.fingerprint() != as_bytes.fingerprint()
    with pytest.raises(ConfigError, match=r"vocab is 399, .* 400 tokens"):
        Corpus.load(data, sequence=16, global_batch=2, seed=0, vocab=399)
    largest = max(ids)
    fixed = Corpus.load(data, sequence=16, global_batch=2, seed=0, vocab=largest + 1, fixed=True)
    assert fixed.fingerprint() == corpus.fingerprint(), "a checkpoint has no row for tokens of no text"
    with pytest.raises(
        ConfigError, match=f"has the token {largest} .* model.vocab is {largest}: take it out"
    ):
        Corpus.load(data, sequence=16, global_batch=2, seed=0, vocab=largest, fixed=True)


def test_a_prompt_is_encoded_as_transformers_does(tables: Path, tmp_path: Path) -> None:
    """With the token that begins a text, as Llama 3 has it, and special tokens that are special."""
    import transformers  # takes seconds, which only some workers spend

    bpe = tokenizers.Tokenizer.from_file(str(tables / "hugging-face" / "tokenizer.json"))
    bpe.add_special_tokens(["<|begin|>"])
    begin = bpe.token_to_id("<|begin|>")
    bpe.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", begin)]
    )
    bpe.save(str(tmp_path / "tokenizer.json"))
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    ours = load_tokenizer(str(tmp_path))
    text = "the end<|endoftext|>the start"
    (as_text,) = ours.encode([text.encode()])
    expected = theirs(text)["input_ids"]
    assert ours.prompt(text) == expected and expected[0] == begin and 0 in expected
    assert 0 not in as_text and ours.encode([text.encode()])[0].tolist() == as_text.tolist()
    assert load_tokenizer("bytes").prompt("\u4e2d") == list("\u4e2d".encode())


def test_what_ends_a_text(tables: Path, tmp_path: Path) -> None:
    """Ends of documents, and the ids at which the model's own settings end a text."""
    assert load_tokenizer("bytes").ends == {0}
    folder = tmp_path / "chat"
    shutil.copytree(tables / "hugging-face", folder)
    (end,) = load_tokenizer(str(folder)).ends
    (folder / "tokenizer_config.json").write_text('{"eos_token": "the"}')
    word = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id("the")
    assert load_tokenizer(str(folder)).ends == {end, word}
    for ids, more in (("7", {7}), ("[7, 8]", {7, 8}), ("null", set())):
        (folder / "generation_config.json").write_text(f'{{"eos_token_id": {ids}}}')
        assert load_tokenizer(str(folder)).ends == {end, word} | more
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(DataError, match=r"generation_config.json cannot be read"):
        load_tokenizer(str(folder))


def write_special(folder: Path, tables: Path, files: dict[str, object], *, adds: bool = False) -> Path:
    """The small BPE with <s>, </s> and <|turn|> beside <|endoftext|>, and settings."""
    bpe = tokenizers.Tokenizer.from_file(str(tables / "hugging-face" / "tokenizer.json"))
    bpe.add_special_tokens(["<s>", "</s>", "<|turn|>"])
    if adds:
        bpe.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", bpe.token_to_id("<s>"))]
        )
    folder.mkdir()
    bpe.save(str(folder / "tokenizer.json"))
    for name, values in files.items():
        (folder / name).write_text(values if isinstance(values, str) else json.dumps(values))
    return folder


END, BEGIN, STOP, TURN, NEXT = 0, 400, 401, 402, 403
TURN_TEMPLATE = "{% for m in messages %}{{ m.content }}<|turn|>{% endfor %}"


@pytest.mark.parametrize(
    ("files", "between", "ends"),
    [
        ({}, END, {END}),
        ({"tokenizer_config.json": {"eos_token": "</s>"}}, STOP, {END, STOP}),
        ({"special_tokens_map.json": {"eos_token": {"content": "</s>"}}}, STOP, {END, STOP}),
        ({"config.json": {"eos_token_id": STOP}}, STOP, {END, STOP}),
        ({"config.json": {"text_config": {"eos_token_id": STOP}}}, STOP, {END, STOP}),
        ({"generation_config.json": {"eos_token_id": [STOP, TURN]}}, STOP, {END, STOP, TURN}),
        ({"config.json": {"eos_token_id": None}, "tokenizer_config.json": {"eos_token": None}}, END, {END}),
        ({"config.json": {"eos_token_id": 10**12}}, END, {END}),
        ({"tokenizer_config.json": {"eos_token": "none such"}}, NEXT, {END, NEXT}),
        (
            {
                "tokenizer_config.json": {"eos_token": "none such"},
                "config.json": {"vocab_size": NEXT, "eos_token_id": STOP},
            },
            STOP,
            {END, STOP},
        ),
        # What ends a turn ends no text.
        (
            {"tokenizer_config.json": {"eos_token": "<|turn|>", "chat_template": TURN_TEMPLATE}},
            END,
            {END, TURN},
        ),
        (
            {
                "tokenizer_config.json": {"eos_token": "<|turn|>"},
                "chat_template.jinja": TURN_TEMPLATE,
                "generation_config.json": {"eos_token_id": [TURN, STOP]},
            },
            STOP,
            {END, STOP, TURN},
        ),
    ],
)
def test_the_end_of_text_is_what_the_files_say(
    tables: Path, tmp_path: Path, files: dict[str, object], between: int, ends: set[int]
) -> None:
    found = load_tokenizer(str(write_special(tmp_path / "t", tables, files)))
    assert found.encode([SEPARATOR])[0].tolist() == [between] and found.ends == ends


@pytest.mark.parametrize("end", [-1, 1 << 20, "1", 1.0, True, [END, -1]])
@pytest.mark.timeout(20)
def test_an_end_of_text_that_is_no_token_is_reported(
    tables: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, end: object
) -> None:
    for name, value, reported in (("a", END, False), ("b", None, False), ("c", end, True)):
        files = {"generation_config.json": {"eos_token_id": value}}
        assert load_tokenizer(str(write_special(tmp_path / name, tables, files))).ends == {END}
        assert ("eos_token_id" in caplog.text) == reported


@pytest.mark.parametrize(
    ("ids", "reports"), [((400, 401, 402), 0), ((400, 401, 410), 1), ((401, 400, 402), 2)]
)
@pytest.mark.timeout(20)
def test_an_added_token_with_another_id_than_its_file_says_is_reported(
    tables: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, ids: tuple[int, ...], reports: int
) -> None:
    folder = write_special(tmp_path / "t", tables, {})
    values = json.loads((folder / "tokenizer.json").read_text())
    for token, index in zip(values["added_tokens"][1:], ids, strict=True):
        token["id"] = index
    (folder / "tokenizer.json").write_text(json.dumps(values))
    for _ in range(2):
        load_tokenizer(str(folder))
    assert len(caplog.records) == reports


@pytest.mark.parametrize("value", [[], None, 7, "a"])
@pytest.mark.timeout(20)
def test_settings_that_are_no_object_are_refused(tables: Path, tmp_path: Path, value: object) -> None:
    for number, name in enumerate(("tokenizer_config.json", "added_tokens.json", "generation_config.json")):
        folder = write_special(tmp_path / f"{number}", tables, {})
        (folder / name).write_text(json.dumps(value))
        with pytest.raises(DataError, match=name):
            load_tokenizer(str(folder))


@pytest.mark.parametrize(
    ("settings", "adds", "begin"),
    [
        ({}, False, ()),
        ({}, True, (BEGIN,)),
        ({"add_bos_token": False, "bos_token": "<s>"}, True, (BEGIN,)),
        ({"add_bos_token": True, "bos_token": "<s>"}, False, ()),
    ],
)
def test_texts_begin_as_the_tokenizer_says(
    tables: Path, tmp_path: Path, cache: Path, settings: dict[str, object], adds: bool, begin: tuple[int, ...]
) -> None:
    """In training, whole and in shards, as in a prompt."""
    folder = write_special(tmp_path / "t", tables, {"tokenizer_config.json": settings}, adds=adds)
    found = load_tokenizer(str(folder))
    text = [*found.encode([b"a cat"])[0].tolist()]
    assert found.begin == begin
    assert found.prompt("a cat") == [*begin, *text]
    assert found.prompt("<s>a cat") == [BEGIN, *text], "it is not written twice"
    ids = tokens_of(SEPARATOR.join([b"a cat", b"a cat"]), found, cache, quiet)
    assert ids.tolist() == [*begin, *text, END, *begin, *text]
    rows = "".join(json.dumps({"text": "a cat"}) + "\n" for _ in range(9))
    (tmp_path / "rows.jsonl").write_text(rows)
    data = DataSection(path=str(tmp_path / "rows.jsonl"), tokenizer=str(folder))
    source = TokenizedSource(list_source(data.path), data, found, None, 500, tmp_path / "parts")
    assert source.counts(0, 0) is not None
    assert source.part(0, 0).tokens.tolist() == [*begin, *text, END] * 9
    other = load_tokenizer(str(write_special(tmp_path / "other", tables, {})))
    assert (other.fingerprint == found.fingerprint) == (not begin and not adds)


BEYOND = {"content": "<|b|>", "special": False, "lstrip": True}


@each("adds", [False, True])
@each(
    "files",
    [
        {"tokenizer_config.json": {"add_bos_token": True, "add_eos_token": False, "bos_token": "<s>"}},
        {"tokenizer_config.json": {"add_bos_token": False, "pad_token": "<|b|>", "eos_token": "<|a|>"}},
        {"tokenizer_config.json": {"added_tokens_decoder": {"404": BEYOND, "403": {"content": "<|a|>"}}}},
        {"tokenizer_config.json": {"added_tokens_decoder": {"401": {"content": "</s>", "rstrip": True}}}},
        {"tokenizer_config.json": {"extra_special_tokens": ["<|b|>", "<|a|>"]}},
        {
            "tokenizer_config.json": {
                "additional_special_tokens": ["<|a|>"],
                "turn_token": "<|b|>",
            }
        },
        *(
            {
                "tokenizer_config.json": {
                    "additional_special_tokens": ["<|a|>"],
                    "extra_special_tokens": extra,
                }
            }
            for extra in (["<|b|>"], {"image_token": "<|b|>"})
        ),
        {
            "special_tokens_map.json": {"additional_special_tokens": ["<|a|>"]},
            "tokenizer_config.json": {"extra_special_tokens": ["<|b|>"]},
        },
        {"tokenizer_config.json": {"model_specific_special_tokens": {"image": "<|b|>"}}},
        {"added_tokens.json": {"<|b|>": 403}, "tokenizer_config.json": {"pad_token": "<|a|>"}},
        {"special_tokens_map.json": {"unk_token": {"content": "<|b|>"}, "pad_token": "<|a|>"}},
        {
            "special_tokens_map.json": {"eos_token": "<|b|>"},
            "tokenizer_config.json": {"eos_token": "<|a|>"},
        },
        {
            "special_tokens_map.json": {"eos_token": "<|b|>"},
            "tokenizer_config.json": {"added_tokens_decoder": {}, "eos_token": "<|a|>"},
        },
    ],
)
@each("kind", ["PreTrainedTokenizerFast", "GPT2Tokenizer", "Qwen2Tokenizer"])
def test_settings_beside_the_tables_give_the_ids_of_transformers(
    tables: Path, tmp_path: Path, files: dict[str, dict[str, object]], adds: bool, kind: str
) -> None:
    """Tokens that only settings have, tokens that begin a text, and the rules of a class without
    `tokenizer.json`."""
    import transformers

    settings = {"tokenizer_class": kind, **files.get("tokenizer_config.json", {})}
    folder = write_special(tmp_path / "t", tables, {**files, "tokenizer_config.json": settings}, adds=adds)
    if kind != "PreTrainedTokenizerFast":
        model = json.loads((folder / "tokenizer.json").read_text())["model"]
        (folder / "tokenizer.json").unlink()
        (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
        merges = [" ".join(pair) for pair in model["merges"]]
        (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = load_tokenizer(str(folder))
    text = "the <|a|> cat </s> and <|b|> dog<|turn|> 3600 e\u0301 IT'S\n\n end"
    assert ours.prompt(text) == theirs(text)["input_ids"]
    assert ours.vocabulary == len(theirs)


@pytest.mark.parametrize(
    ("tokens", "config", "fixed", "cut", "reports"),
    [
        (100_001, {"model_type": "mistral"}, True, 2, 0),
        (100_001, {"model_type": "mistral"}, False, 1, 0),
        (100_001, {"model_type": "mistral", "transformers_version": "4.57.6"}, None, 1, 1),
        (100_001, {"model_type": "mistral", "transformers_version": "5.0.0"}, True, 1, 0),
        (100_001, {"model_type": "llama"}, True, 1, 0),
        (300, {"model_type": "mistral"}, True, 1, 0),
    ],
)
def test_words_are_cut_as_mistral_s_settings_say(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    tokens: int,
    config: dict[str, str],
    fixed: bool | None,
    cut: int,
    reports: int,
) -> None:
    """Many a `tokenizer.json` of Mistral has the pattern of GPT-4. A setting of transformers mends it."""
    import transformers
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*letters, "eB", *map("~{}".format, range(tokens))])}
    tables = Tokenizer(models.BPE(vocabulary, [("e", "B")]))
    tables.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tables.decoder = decoders.ByteLevel()
    tables.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "~1", "fix_mistral_regex": fixed}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    ours = load_tokenizer(str(tmp_path))
    assert (len(ours.prompt("eB")), len(caplog.records)) == (cut, reports)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert ours.prompt("an eBay 12") == theirs("an eBay 12")["input_ids"]


@pytest.mark.parametrize("lowercase", [False, True])
@pytest.mark.parametrize("tables", ["spaces", "bytes"])
def test_tables_that_change_characters_are_read_as_transformers_does_and_reported(
    tmp_path: Path, tables: str, lowercase: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The Unigram tables of Japanese Llama models write characters in their plain forms (NFKC)."""
    import transformers
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    small = [normalizers.Lowercase()] if lowercase else []
    if tables == "spaces":
        pieces = [("<unk>", 0.0), *((f"<0x{byte:02X}>", -9.0) for byte in range(256)), ("\u2581", -3.0)]
        bpe = tokenizers.Tokenizer(models.Unigram(pieces, 0, byte_fallback=True))
        spaces = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        bpe.normalizer = normalizers.Sequence([normalizers.NFKC(), *small, *spaces])
        parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
        bpe.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    else:
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        bpe = tokenizers.Tokenizer(models.BPE({letter: at for at, letter in enumerate(letters)}, []))
        bpe.normalizer = normalizers.Sequence([normalizers.NFKC(), *small])
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = decoders.ByteLevel()
    bpe.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    ours = load_tokenizer(str(tmp_path))
    assert "changes characters before it cuts text" in caplog.text
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "\uff21\uff22 \ufb01 \u00bd"
    assert ours.prompt(text) == theirs(text)["input_ids"]
    assert ours.decode(np.array(ours.prompt(text))) == ("ab fi 1\u20442" if lowercase else "AB fi 1\u20442")


@pytest.mark.parametrize(
    ("settings", "config"),
    [
        ({}, {"model_type": "gpt2"}),
        ({"eos_token": None}, {"model_type": "gpt2"}),
        ({"tokenizer_class": "GPT2Tokenizer"}, {}),
        ({"tokenizer_class": "GPT2TokenizerFast", "bos_token": "<s>"}, {"model_type": "llama"}),
        ({"tokenizer_class": "GPT2Tokenizer"}, {"model_type": "olmo2"}),
        ({}, {"model_type": "qwen3"}),
        ({"tokenizer_class": "Qwen2Tokenizer"}, {}),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, {"model_type": "gpt2"}),
        ({}, {"model_type": "olmoe"}),
        ({}, {}),
    ],
)
def test_tokens_that_no_file_names_are_those_of_the_class(
    tables: Path, tmp_path: Path, settings: dict[str, Any], config: dict[str, Any]
) -> None:
    """GPT-2's folder names no tokens, and a template of the user's own may write `eos_token`."""
    import transformers

    files: dict[str, object] = {"tokenizer_config.json": {"model_max_length": 64, **settings}}
    files |= {"config.json": config} if config else {}
    folder = write_special(tmp_path / "t", tables, files)
    if not (config or "tokenizer_class" in settings):
        assert special_tokens(folder) == {}
        return
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = special_tokens(folder)
    assert (ours.get("bos_token"), ours.get("eos_token")) == (theirs.bos_token, theirs.eos_token)


@pytest.mark.parametrize(
    ("kind", "model", "prepends", "reported"),
    [
        ("LlamaTokenizer", "llama", True, True),
        ("LlamaTokenizerFast", "llama", False, False),
        ("LlamaTokenizer", "mistral", True, False),
        ("PreTrainedTokenizerFast", "llama", True, False),
    ],
)
def test_a_class_for_which_transformers_has_other_rules_than_the_file_is_reported(
    tmp_path: Path, kind: str, model: str, prepends: bool, reported: bool, caplog: pytest.LogCaptureFixture
) -> None:
    import transformers
    from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "\u2581a", "a"]
    vocabulary = {name: at for at, name in enumerate(names)}
    merges = [("\u2581", "a")]
    bpe = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    if prepends:
        parts = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        bpe.normalizer = normalizers.Sequence(parts)
    else:
        bpe.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", prepend_scheme="first", split=False)
    after = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    bpe.decoder = decoders.Sequence([*after, decoders.Strip(" ", 1, 0)])
    bpe.add_special_tokens([AddedToken(name, normalized=False) for name in names[:3]])
    bpe.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": kind, "legacy": False, "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model}))
    ours = load_tokenizer(str(tmp_path))
    assert ("PreTrainedTokenizerFast there" in caplog.text) == reported
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert ours.prompt("a a") == theirs("a a", add_special_tokens=False)["input_ids"]
    same = ours.prompt("a</s>a") == theirs("a</s>a", add_special_tokens=False)["input_ids"]
    assert same != reported
    (tmp_path / "tokenizer_config.json").write_bytes(_written_settings(json.dumps(settings).encode()))
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert exported("a</s>a", add_special_tokens=False)["input_ids"] == ours.prompt("a</s>a")
    assert exported.eos_token == "</s>"


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_sentencepiece_model_gives_its_own_ids(tmp_path: Path, kind: str) -> None:
    golden = json.loads((Path(__file__).parents[3] / "golden" / "sentencepiece.json").read_text())[kind]
    (tmp_path / "tokenizer.model").write_bytes(base64.b64decode(golden["model"]))
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    (tmp_path / "added_tokens.json").write_text('{"<|turn|>": 420}')
    found = load_tokenizer(str(tmp_path))
    assert found.vocabulary == 421 and found.begin == (1,) and found.ends == {2}
    turn = {"content": "<|turn|>", "special": True, "rstrip": True}
    decoder = {"2": {"content": "</s>", "normalized": True}, "420": turn}
    settings = {"added_tokens_decoder": decoder, "add_bos_token": False, "pad_token": "<pad>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    other = load_tokenizer(str(tmp_path))
    assert (other.vocabulary, other.begin, other.ends) == (422, (), {2})
    assert other.prompt("a</s><|turn|>b") == found.prompt("a</s><|turn|>b")[1:]
    assert other.prompt("<pad>")[-1] == 421
    assert other.prompt("<|turn|> b")[-3:] == other.prompt("<|turn|>b")[-3:], "it takes the space behind it"
    assert 420 not in other.encode([b"a<|turn|>"])[0] and 420 in found.encode([b"a<|turn|>"])[0]
    assert other.fingerprint != found.fingerprint
    space, letter = found.prompt("<|turn|>b")[2:]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"legacy": False}))
    newer = load_tokenizer(str(tmp_path))
    assert newer.prompt("<|turn|>b") == [1, 420, letter] and newer.prompt("b<|turn|>")[1] == space
    for text, ids in golden["cases"]:
        assert text.startswith(" ") or newer.encode([text.encode()])[0].tolist() == ids
    assert newer.fingerprint != found.fingerprint
    (tmp_path / "tokenizer_config.json").unlink()
    for text, ids in golden["cases"]:
        assert found.encode([text.encode()])[0].tolist() == ids
    assert found.prompt("<|turn|>")[:2] == [1, 420]
    made = of_tables(str(tmp_path))
    assert made is not None
    again = tokenizers.Tokenizer.from_str(made.to_json())
    assert all(again.encode(text, add_special_tokens=False).ids == ids for text, ids in golden["cases"])


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        *((damage, "cannot be read") for damage in (b"", b"\xff" * 40, b"\x0a\xff\xff\xff\x0f")),
        (b"\x0a\x02\x15\x00", "cannot be read"),
        (b"IQ== 0\nIg== 1\n", "is a table of tiktoken"),
    ],
)
def test_a_damaged_sentencepiece_model_is_refused(tmp_path: Path, damage: bytes, what: str) -> None:
    (tmp_path / "tokenizer.model").write_bytes(damage)
    with pytest.raises(DataError, match=what):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
@pytest.mark.parametrize("kind", ["pipe", "device", "huge", "folder", "deep"])
def test_files_of_strangers_are_read_within_bounds(
    tables: Path, tmp_path: Path, name: str, kind: str
) -> None:
    folder = write_special(tmp_path / "t", tables, {"tokenizer_config.json": {"chat_template": "{{ 1 }}"}})
    path = folder / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    elif kind == "huge":
        with path.open("wb") as file:
            file.truncate(MOST_TABLES_BYTES + 1)
    else:
        path.write_text("[" * 100_000)
    if kind == "deep" and name == "chat_template.jinja":
        assert load_tokenizer(str(folder)).vocabulary == 403
        return
    with pytest.raises(DataError):
        load_tokenizer(str(folder))
    with pytest.raises(DataError):
        load_chat_encoder(str(folder), "")


def test_what_is_no_tokenizer_is_refused_in_one_line(
    tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match=r"no tokenizer 'byte': set .* to bytes, or to a folder or file"):
        load_tokenizer("byte")
    with pytest.raises(DataError, match=r"expected tokenizer.json"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(DataError, match=f"no tokenizer in {tmp_path}: expected vocab.json and merges.txt"):
        load_tokenizer(str(tmp_path / "vocab.json"))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    with pytest.raises(DataError, match="cannot be read"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("[1, 2")
    with pytest.raises(DataError, match="cannot be read"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(DataError, match="git lfs pull"):
        load_tokenizer(str(tmp_path))
    vocab = {letter: number for number, letter in enumerate("abcdefgh\u0100")}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(DataError, match="does not give back every text"):
        load_tokenizer(str(tmp_path / "merges.txt"))
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    for lead in (0xE2, 0xF3):  # which byte-level tables write as these letters
        without = [letter for letter in letters if letter != chr(lead)]
        (tmp_path / "vocab.json").write_text(json.dumps({letter: at for at, letter in enumerate(without)}))
        with pytest.raises(DataError, match="does not give back every text"):
            load_tokenizer(str(tmp_path / "merges.txt"))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match=r'needs the tokenizers package .*: pip install "thinwire\[bpe\]"'):
        load_tokenizer(str(tables / "gpt2"))
    assert load_tokenizer("bytes").vocabulary == 256


def test_a_folder_that_cannot_be_written_is_named(tables: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"cannot be kept .* XDG"):
        tokens_of(b"text", load_tokenizer(str(tables / "gpt2")), tmp_path / "file" / "tokens", quiet)


def test_tables_in_a_folder_that_may_not_be_entered(tables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locked = tables / "gpt2"

    def stat(self: Path, **options: bool) -> None:
        if locked in self.parents:
            raise PermissionError(13, "Permission denied", str(self))
        return whole(self, **options)

    whole = Path.stat
    monkeypatch.setattr(Path, "stat", stat)
    for name in (locked, locked / "vocab.json"):
        with pytest.raises(DataError, match=f"cannot read {name}: Permission denied; check the path and"):
            load_tokenizer(str(name))
