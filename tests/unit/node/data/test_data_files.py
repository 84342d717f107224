"""Files as people and strangers make them: each is read as what it holds, or refused in one line."""

import bz2
import gzip
import json
import lzma
import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from node.config.schema import DataSection, ModelSection, RunConfig, TrainingSection
from node.data import documents, text
from node.data.chat import Dropped
from node.data.documents import list_source, read_rows, read_text, text_of
from node.data.samples import held_out_samples, packed_parts
from node.data.shards import ShardedCorpus, in_shards, load_data
from node.data.text import TOKEN_SUFFIXES, open_content, read_file
from node.data.tokenizer_training import train_tokenizer
from node.model.labels import BatchPart
from tests.support.cases import each
from tests.support.chat_data import write_tokenizer
from wire.errors import DataError

BOM = b"\xef\xbb\xbf"
WORDS = "The ferry leaves at seven. " * 4


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ".cache"))


def config_of(path: Path, **data: Any) -> RunConfig:
    return RunConfig(
        model=ModelSection(vocab=256, sequence=16),
        data=DataSection(path=str(path), **{"order": "shards", **data}),
        training=TrainingSection(global_batch=4),
    )


def texts_of(path: Path, **data: Any) -> list[bytes]:
    """The texts of a source in shards, without those that are left out."""
    section = config_of(path, **data).data
    source = list_source(str(path))
    found = []
    for shard in source.shards:
        for place, row in read_rows(shard, section, skips=source.skips):
            try:
                found.append(text_of(row, place, section))
            except Dropped:
                continue
    return found


def jsonl(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


ROWS = [{"text": f"{number} {WORDS}"} for number in range(5)]
TEXTS = [row["text"].encode() for row in ROWS]


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.JSONL", "a.json", "a.Json.GZ", "a.jsonl.BZ2"])
@pytest.mark.parametrize(
    "content", [jsonl(ROWS), json.dumps(ROWS).encode(), json.dumps(ROWS, indent=1).encode()]
)
@pytest.mark.parametrize("mark", [b"", BOM])
def test_rows_of_json_are_read_whatever_the_layout(
    tmp_path: Path, name: str, content: bytes, mark: bytes
) -> None:
    packers: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".bz2": bz2.compress}
    pack = packers.get(Path(name).suffix.lower(), bytes)
    (tmp_path / name).write_bytes(pack(mark + content))
    assert texts_of(tmp_path / name) == TEXTS
    assert read_text(DataSection(path=str(tmp_path / name))) == b"\0".join(TEXTS)
    (tmp_path / "b.txt").write_bytes(b"text\n")
    assert texts_of(tmp_path) == [*TEXTS, b"text\n"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
@pytest.mark.parametrize("layout", [jsonl, lambda rows: json.dumps(rows).encode()], ids=["lines", "array"])
def test_a_list_of_messages_is_a_conversation(
    name: str, layout: Callable[[list[Any]], bytes], tmp_path: Path
) -> None:
    talks = [[{"role": "user", "content": text}, {"role": "assistant", "content": "a"}] for text in "bcd"]
    (tmp_path / name).write_bytes(layout(talks))
    data = DataSection(format="chat", path=str(tmp_path))
    rows = [
        row for shard in list_source(str(tmp_path)).shards for _, row in read_rows(shard, data, skips=False)
    ]
    assert rows == [{"messages": talk} for talk in talks]
    (tmp_path / name).write_bytes(layout([[{"text": "a"}], [{"role": "user"}]]))
    with pytest.raises(DataError, match="not a JSON object"):
        list(read_rows(list_source(str(tmp_path / name)).shards[0], data, skips=False))


@pytest.mark.parametrize(
    "content",
    [
        jsonl(ROWS),
        json.dumps(ROWS).encode(),
        b'{"a":\n 1}',
        b'["a",\n"b"]',
        BOM + b"[{}]",
        3 * b'{"a":\n 1}\n',
    ],
)
def test_json_under_a_text_s_name_is_no_text(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    for order in ("whole", "shards"):
        with pytest.raises(DataError, match="holds JSON, not text"):
            load_data(config_of(tmp_path / "a.txt", order=order))
    (tmp_path / "settings.json").write_bytes(b'{"a": 1}')
    (tmp_path / "b.txt").write_text(WORDS)
    assert texts_of(tmp_path) == [WORDS.encode()]
    dropped: Counter[str] = Counter()
    assert read_text(DataSection(path=str(tmp_path)), dropped) == WORDS.encode()
    assert dict(dropped) == {"file that holds JSON, not text": 1}


@pytest.mark.parametrize(
    "content", [b"[1] A note.\n[2] Another.\n", b'{"a": 1}\nshows an object.\n', b"[a](b)\n"]
)
def test_text_may_begin_with_json(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    assert texts_of(tmp_path / "a.txt") == [content]


@pytest.mark.parametrize(
    ("content", "kind"),
    [(gzip.compress(jsonl(ROWS)), "is a gzip file"), (jsonl(ROWS).decode().encode("utf-16"), "is UTF-16")],
    ids=["gzip", "utf-16"],
)
def test_rows_in_another_form_are_named(tmp_path: Path, content: bytes, kind: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=kind):
        texts_of(tmp_path / "a.jsonl")


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(BOM + b"one\n" + BOM + b"two\n[1] note")
    expected = b"one\ntwo\n[1] note"
    assert texts_of(tmp_path / "a.txt") == [expected]
    assert read_text(DataSection(path=str(tmp_path / "a.txt"))) == expected
    (tmp_path / "b.jsonl").write_bytes(jsonl([{"text": "\ufeffone"}]))
    assert texts_of(tmp_path / "b.jsonl") == [b"one"]
    (tmp_path / "settings.json").write_bytes(BOM + b"{}")
    assert read_file(tmp_path / "settings.json") == b"{}"
    (tmp_path / "wide.txt").write_text("one", encoding="utf-16")
    for read in (texts_of, read_file):
        with pytest.raises(DataError, match="UTF-16"):
            read(tmp_path / "wide.txt")


def test_a_long_window_of_zstd_and_halves_of_characters_are_read(tmp_path: Path) -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=28)
    rows = b'{"text": "a\\ud83d"}\n{"text": "\xed\xa0\xbd\xed\xb8\x80"}\n' * 10
    packed = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    (tmp_path / "a.jsonl.zst").write_bytes(packed.compress(rows) + packed.flush())
    assert texts_of(tmp_path / "a.jsonl.zst") == ["a\ufffd".encode(), "\U0001f600".encode()] * 10


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


@pytest.mark.parametrize("suffix", PACKERS)
@pytest.mark.parametrize("kind", [".txt", ".jsonl", ".json"])
def test_a_small_file_cannot_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, kind: str
) -> None:
    monkeypatch.setattr(documents, "MOST_BYTES", 1 << 20)
    monkeypatch.setattr(text, "SURE_BYTES", 1 << 20)
    path = tmp_path / f"a{kind}{suffix}"
    path.write_bytes(PACKERS[suffix](b'[{"text": "' * (kind == ".json") + b"a" * (5 << 20)))
    for order in ("auto", "shards"):
        with pytest.raises(DataError, match=r"a\..*(decompressed|MiB)") as caught:
            load_data(config_of(path, order=order))
        assert "\n" not in str(caught.value)
    # Several streams in a row, and what is cut off.
    whole = PACKERS[suffix](WORDS.encode())
    (tmp_path / f"b.txt{suffix}").write_bytes(whole * 3)
    assert texts_of(tmp_path / f"b.txt{suffix}") == [WORDS.encode() * 3]
    (tmp_path / f"c.txt{suffix}{suffix}").write_bytes(PACKERS[suffix](whole))
    with pytest.raises(DataError, match="unpack it"):
        texts_of(tmp_path / f"c.txt{suffix}{suffix}")


def test_links_and_special_files_of_a_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "secret.txt").write_text("secret")
    folder = tmp_path / "data"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "a.txt").write_text("one")
    (folder / "in.txt").symlink_to("deep/a.txt")
    (folder / "out.txt").symlink_to("../secret.txt")
    (folder / "deep" / "loop").symlink_to("..")
    (folder / ".hidden.txt").write_text("hidden")
    (folder / "self.txt").symlink_to("self.txt")
    os.mkfifo(folder / "pipe.txt")
    assert texts_of(folder) == [b"one", b"one"]
    assert read_text(DataSection(path=str(folder))) == b"one\0one"
    for skipped in ("1 x link out of the folder", "2 x no regular file", "1 x hidden"):
        assert skipped in caplog.text
    # A link that the user names is what the user means; a pipe is not opened.
    assert texts_of(folder / "out.txt") == [b"secret"]
    for path in (folder / "pipe.txt", Path("/dev/zero"), folder / "self.txt"):
        for order in ("auto", "shards"):
            with pytest.raises(DataError):
                load_data(config_of(path, order=order))
        with pytest.raises((DataError, OSError)):
            read_file(path)
    # The kernel's files have no size, and some never end.
    assert read_file(Path("/proc/self/status")) == b"" == open_content(Path("/proc/self/status")).read()


@pytest.mark.parametrize("order", ["auto", "shards"])
@pytest.mark.timeout(20)
def test_copies_of_a_file_and_empty_files_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, order: str
) -> None:
    for name, content in (("a", WORDS), ("b", WORDS[::-1]), ("c", ""), ("d", "")):
        (tmp_path / f"{name}.txt").write_text(content * 40)
    load_data(config_of(tmp_path, order=order))
    assert "copies" not in caplog.text
    (tmp_path / "e.txt").write_text(WORDS * 40)
    load_data(config_of(tmp_path, order=order))
    assert "1 of the 5 files" in caplog.text and "e.txt of a.txt" in caplog.text
    (tmp_path / "f.jsonl").write_text("")
    assert "empty" not in caplog.text, "texts may be"
    load_data(config_of(tmp_path, order=order))
    assert "1 of the 6 files" in caplog.text and "empty, such as f.jsonl" in caplog.text
    assert "both read" not in caplog.text
    (tmp_path / "f.json").write_text(json.dumps(ROWS))
    load_data(config_of(tmp_path, order=order))
    assert "f.jsonl are both read" in caplog.text


def test_a_snapshot_in_the_hub_s_cache_links_to_its_files(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "0123").write_text("one")
    folder = tmp_path / "snapshots" / "revision"
    folder.mkdir(parents=True)
    (folder / "a.txt").symlink_to("../../blobs/0123")
    (folder / "b.txt").symlink_to("../../../secret.txt")
    assert texts_of(folder) == [b"one"]


def save_split(folder: Path, texts: list[str]) -> None:
    folder.mkdir(parents=True)
    table = pyarrow.table({"text": texts})
    for name in ("data-00000-of-00001.arrow", "cache-0123.arrow", "other.arrow"):
        with pyarrow.ipc.new_stream(folder / name, table.schema) as writer:
            writer.write_table(table)
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]})
    )
    (folder / "dataset_info.json").write_text('{"description": ""}')


def test_saved_data_sets_are_read_without_caches_and_one_split_at_a_time(tmp_path: Path) -> None:
    save_split(tmp_path / "d" / "train", ["train"])
    assert in_shards(DataSection(path=str(tmp_path / "d")))
    assert texts_of(tmp_path / "d") == [b"train"]
    save_split(tmp_path / "d" / "validation", ["valid"])
    (tmp_path / "d" / "dataset_dict.json").write_text('{"splits": ["train", "validation"]}')
    with pytest.raises(DataError, match=r"several splits \(train, validation in .*path, sources or valid"):
        load_data(config_of(tmp_path / "d", order="auto"))
    assert texts_of(tmp_path / "d" / "validation") == [b"valid"]
    (tmp_path / "d" / "train" / "data-00000-of-00001.arrow").unlink()
    with pytest.raises(DataError, match=r"lacks 'data-00000-of-00001\.arrow'"):
        texts_of(tmp_path / "d" / "train")
    for name, configuration in (("en", "english"), ("fr", "french")):
        save_split(tmp_path / "cache" / name, [name])
        info = {"dataset_name": "x", "config_name": configuration}
        (tmp_path / "cache" / name / "dataset_info.json").write_text(json.dumps(info))
    with pytest.raises(DataError, match=r"several configurations \(english, french"):
        texts_of(tmp_path / "cache")
    (tmp_path / "hub").mkdir()
    for split in ("train", "test"):
        name = f"{split}-00000-of-00001.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"text": [split]}), tmp_path / "hub" / name)
    with pytest.raises(DataError, match=r"several splits \(test, train"):
        texts_of(tmp_path / "hub")


def stream_of(*texts: str) -> bytes:
    """A stream of Arrow with a batch for each text."""
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, pyarrow.schema({"text": pyarrow.string()})) as writer:
        for text_ in texts:
            writer.write_batch(pyarrow.record_batch({"text": [text_]}))
    return bytes(sink.getvalue())


def parquet_of(*texts: str) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), sink)
    return bytes(sink.getvalue())


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("a.arrow", stream_of("one", "two") + stream_of("three"), "holds several streams"),
        ("a.arrow", stream_of("one", "two") + b"\n", "holds several streams"),
        ("a.arrow", stream_of("one", "two")[: len(stream_of("one")) - 8], "is cut off"),
        ("a.arrow", stream_of("one", "two")[:-8], "is cut off"),
        ("a.parquet", parquet_of("one") * 2, "holds several parquet files"),
        ("a.parquet", parquet_of(*map(str, range(9000))) + parquet_of("one"), "holds several parquet files"),
    ],
)
def test_half_of_a_table_is_not_taken_for_the_whole(
    tmp_path: Path, name: str, content: bytes, what: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=what):
        list_source(str(tmp_path / name))
    (tmp_path / "whole.parquet").write_bytes(parquet_of("PAR1PAR1"))
    assert texts_of(tmp_path / "whole.parquet") == [b"PAR1PAR1"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_preferences_are_named(tmp_path: Path, name: str) -> None:
    row = {"prompt": "How warm?", "chosen": "Seven.", "rejected": "Nine."}
    if name == "a.jsonl":
        (tmp_path / name).write_text(json.dumps(row))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / name)
    write_tokenizer(tmp_path / "tok")
    config = config_of(tmp_path / name, format="chat", tokenizer=str(tmp_path / "tok"))
    with pytest.raises(DataError, match=r"preferences between two answers .*as .messages."):
        load_data(replace(config, model=ModelSection(vocab=1000, sequence=16)))


@pytest.mark.parametrize("order", ["auto", "shards"])
def test_the_files_of_a_folder_without_data_are_named(tmp_path: Path, order: str) -> None:
    (tmp_path / "a.feather").write_bytes(b"ARROW1")
    (tmp_path / "b.parquet.gz").write_bytes(gzip.compress(parquet_of("one")))
    with pytest.raises(DataError, match=r"\(skipped: 1 x \.feather, 1 x \.gz\); expected .*[aA]rrow"):
        load_data(config_of(tmp_path, order=order))


CARD = """---
license: mit
configs:
- config_name: english
  default: true
  data_files: "{0}"
- config_name: french
  data_files:
  - split: train
    path:
    - '{1}'
dataset_info:
- config_name: english
---
Text.
"""
SPLITS_CARD = """---
configs:
  - config_name: default
    data_files:
      - split: train
        path: {0}
      - split: heldout
        path: ["{1}"]
---
"""
FLOW_CARD = """---
configs:
- {{config_name: default, data_files: [{{split: train, path: {0}}}, {{"split": "heldout", "path": "{1}"}}]}}
---
"""
QUOTED_CARD = SPLITS_CARD.replace("path:", '"path":').replace("split:", "'split':")


@each(
    ("card", "names", "several"),
    [
        (CARD, ("en.jsonl", "fr.jsonl"), "configurations"),
        (CARD, ("en/**/*.jsonl", "./fr"), "configurations"),
        (CARD, ("en/a.jsonl", "gone/*.jsonl"), ""),
        (CARD, ("*/*.jsonl", "*.jsonl"), ""),
        (SPLITS_CARD, ("en/a.jsonl", "fr/*"), "splits"),
        (SPLITS_CARD, ("en/a.jsonl", "none/*"), ""),
        (FLOW_CARD, ("en/a.jsonl", "fr/*"), "splits"),
        (FLOW_CARD, ("en/a.jsonl", "none/*"), ""),
        (QUOTED_CARD, ("en/a.jsonl", "fr/*"), "splits"),
        ("configs:\n- config_name: a\n", ("", ""), ""),
    ],
)
def test_parts_that_a_data_card_names_are_not_mixed(
    tmp_path: Path, card: str, names: tuple[str, str], several: str
) -> None:
    places = ("en.jsonl", "fr.jsonl") if names[0] == "en.jsonl" else ("en/a.jsonl", "fr/b.jsonl")
    for name in places:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(jsonl(ROWS))
    (tmp_path / "README.md").write_text(card.format(*names))
    for order in ("whole", "shards"):
        try:
            load_data(config_of(tmp_path, order=order))
        except DataError as error:
            assert several and f"holds several {several}" in str(error)
        else:
            assert not several


@pytest.mark.parametrize(
    ("names", "several"),
    [
        (("train.jsonl", "test.jsonl"), True),
        (("train_sft-00000-of-00001.jsonl", "train_gen-00000-of-00001.jsonl"), True),
        (("data/en-00000-of-00001.jsonl", "data/fr-00000-of-00001.jsonl"), True),
        (("train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl"), False),
        (("en-00000-of-00001.jsonl", "fr-00000-of-00001.jsonl"), False),
        (("a.jsonl", "a.jsonl.gz"), True),
        (("train.jsonl", "evaluation.jsonl"), True),
        (("train.jsonl", "heldout.jsonl"), True),
        (("train.jsonl", "hold-out.jsonl"), True),
        (("en/train.jsonl", "fr/train.jsonl"), True),
        (("en/train/0000.jsonl", "fr/train/0000.jsonl"), True),
        (("wiki-2/train-00000-of-00001.json", "wiki-103/train-00000-of-00001.json"), True),
        (("en/train.jsonl", "fr/test.jsonl"), True),
        (("shard-1/train.jsonl", "shard-2/train.jsonl"), False),
        (("en/a.jsonl", "fr/a.jsonl"), False),
        (("math/test_cases.jsonl", "code/test_cases.jsonl"), False),
        (("train/a.jsonl", "valid/b.jsonl.gz"), True),
        (("train-00000-of-00002.json", "test-00000-of-00001.json"), True),
        (("tales-train.txt", "tales-valid.txt"), True),
        (("train/a.txt", "test/b.txt"), False),
        (("train-1.jsonl", "train-2.jsonl"), False),
        (("how to train.txt", "test of time.txt"), False),
        (("train.py", "test.py"), False),
        (("train.bin", "val.bin"), True),
        (("train/0.npy", "val/0.npy"), True),
        (("web_train_1.bin", "web_train_2.bin"), False),
    ],
)
def test_parts_of_a_data_set_are_not_mixed(tmp_path: Path, names: tuple[str, str], several: bool) -> None:
    for name in names:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        content = jsonl(ROWS) if ".json" in name else WORDS.encode()
        if path.suffix == ".npy":
            np.save(path, np.arange(200))
        elif path.suffix == ".bin":
            np.arange(200, dtype=np.uint16).tofile(path)
        else:
            path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    for order in ("auto", "shards") if path.suffix in TOKEN_SUFFIXES else ("whole", "shards"):
        try:
            load_data(config_of(tmp_path, order=order))
        except DataError as error:
            assert several and re.search("holds several|holds a.jsonl twice", str(error))
        else:
            assert not several


@each(
    ("names", "reports"),
    [
        (("rows.jsonl", "more.jsonl"), 0),
        (("rows.jsonl", "LICENSE.txt"), 1),
        (("data/rows.jsonl", "loading.py"), 1),
        (("train/pos/0.txt", "test/pos/1.txt"), 1),
        (("lib/0.txt", "test/1.txt"), 0),
        (("train/a/0.txt", "train/b/1.txt"), 0),
    ],
)
@each("order", ["whole", "shards"])
def test_text_that_may_not_be_meant_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, names: tuple[str, ...], reports: int, order: str
) -> None:
    caplog.clear()
    for number, name in enumerate(names):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        rows = jsonl([{"text": f"{number} {row}"} for row in range(100)])
        (tmp_path / name).write_bytes(rows if name.endswith(".jsonl") else f"{number} {WORDS}".encode())
    load_data(config_of(tmp_path, order=order))
    assert len(caplog.records) == reports


def test_missing_files_of_a_split_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "d").mkdir()
    for number in range(3):
        (tmp_path / "d" / f"train-0000{number}-of-00003.jsonl").write_text('{"text": "one"}\n' * 99)
    load_data(config_of(tmp_path / "d"))
    assert "holds" not in caplog.text
    (tmp_path / "d" / "train-00001-of-00003.jsonl").unlink()
    load_data(config_of(tmp_path / "d"))
    assert "holds 2 of the 3 files of train" in caplog.text


def test_a_data_card_and_rows_of_tables_beside_text(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(WORDS)
    assert texts_of(tmp_path) == [WORDS.encode()]
    pyarrow.parquet.write_table(pyarrow.table({"text": ["row"]}), tmp_path / "a.parquet")
    assert in_shards(DataSection(path=str(tmp_path)))
    assert texts_of(tmp_path) == [b"row"]


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("a.csv", b'id,"text"\r\n1,one\r\n', "is a table of 'id', 'text'; .* name it .txt"),
        ("a.tsv.gz", gzip.compress(b"text\tlabel\none\t1\n", mtime=0), "is a table of 'text', 'label'"),
        ("a.csv", b"text\none\n", "is a table of 'text'"),
        ("a.csv", b'id;body\n1;"one\n;two"\n2;"' + b"three\n" * 40_000, "is a table of 'id', 'body'"),
        ("a.txt", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        ("a.jsonl", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        ("a.txt.zst", zstandard.ZstdCompressor().compress(WORDS.encode() * 99)[:-3], "its end is missing"),
        ("a.bin", b"PK\x03\x04" + bytes(60), "is a zip archive"),
        ("a.bin", bytes((7, 0, 0, 0)) * 600, "ids of 32 bits"),
        ("a.bin", (20240520).to_bytes(4, "little") + bytes(2000), "header of llm.c"),
        ("a.bin", b"LITPKDS\1" + bytes(2000), "header of litgpt"),
        ("a.bin", np.array([50, 208, *range(300, 700)], "<u4").tobytes(), "header of litdata"),
        ("a.bin", WORDS.encode() * 3, "holds text, not token ids"),
        ("a.txt", b"name.txt".ljust(257, b"\0") + b"ustar" + bytes(250), "is a tar archive"),
        ("a.txt", b"SQLite format 3\0" + bytes(60), "is a database of SQLite"),
        ("a.jsonl", b'{"text": "a"}\n' + bytes(60), "line 2 .* zero bytes"),
        ("a.jsonl", '{"text": "a"}\n'.encode("utf-16-le"), "line 1 .* zero bytes"),
    ],
)
def test_what_stands_for_something_else_is_refused(
    tmp_path: Path, name: str, content: bytes, what: str
) -> None:
    (tmp_path / name).write_bytes(content)
    for order in ("auto", "shards"):
        with pytest.raises(DataError, match=what):
            load_data(config_of(tmp_path / name, order=order))


def test_a_tokenizer_is_trained_on_tables_as_on_text_and_not_on_ids(tmp_path: Path) -> None:
    rows = [WORDS, None, WORDS[::-1], " "]
    pyarrow.parquet.write_table(pyarrow.table({"body": rows}), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"body": row}) + "\n" for row in rows))
    for name in ("a.parquet", "a.jsonl"):
        data = DataSection(path=str(tmp_path / name), jsonl_field="body")
        assert train_tokenizer(data, 280, tmp_path / f"of-{name}", chat=False) > 259
    one, other = (
        (tmp_path / f"of-a.{kind}" / "tokenizer.json").read_bytes() for kind in ("parquet", "jsonl")
    )
    assert one == other
    np.save(tmp_path / "a.npy", np.arange(99))
    with pytest.raises(DataError, match="holds token ids"):
        train_tokenizer(DataSection(path=str(tmp_path / "a.npy")), 280, tmp_path / "out", chat=False)


def test_maps_are_objects_and_rows_without_messages_may_have_an_answer(tmp_path: Path) -> None:
    """As in a table that joins two data sets. A date that is no question is not read."""
    map_type = pyarrow.map_(pyarrow.string(), pyarrow.string())
    talk = [[[("role", "user"), ("content", "a")]], None]
    odd = pyarrow.array([-1_000_000] * 2, pyarrow.int32()).cast(pyarrow.date32())
    table = pyarrow.table(
        {
            "messages": pyarrow.array(talk, pyarrow.list_(map_type)),
            "prompt": [None, "b"],
            "completion": [None, "c"],
            "context": odd,
        }
    )
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    (shard,) = list_source(str(tmp_path / "a.parquet")).shards
    rows = [row for _, row in read_rows(shard, DataSection(format="chat"), skips=False)]
    assert rows == [
        {"messages": [{"role": "user", "content": "a"}], "prompt": None, "completion": None},
        {"messages": None, "prompt": "b", "completion": "c"},
    ]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_tokenizer_is_trained_on_conversations(kind: str, tmp_path: Path) -> None:
    """With the text of their messages alone."""
    rows = [{"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text}]}
            for text in (WORDS, WORDS[::-1])] * 3  # fmt: skip
    rows.append({"messages": []})
    file = tmp_path / f"a.{kind}"
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    train_tokenizer(DataSection(path=str(file)), 280, tmp_path / "chat", chat=True)
    (tmp_path / "a.txt").write_text("\n".join([WORDS, WORDS, WORDS[::-1], WORDS[::-1]] * 3))
    train_tokenizer(DataSection(path=str(tmp_path / "a.txt")), 280, tmp_path / "text", chat=True)
    one, other = (json.loads((tmp_path / name / "tokenizer.json").read_text()) for name in ("chat", "text"))
    assert one["model"]["merges"][:5] == other["model"]["merges"][:5]
    assert "content" not in one["model"]["vocab"]
    with pytest.raises(DataError, match="--chat"):
        train_tokenizer(DataSection(path=str(file)), 280, tmp_path / "none", chat=False)


@pytest.mark.parametrize("order", ["whole", "shards"])
@pytest.mark.parametrize(
    ("valid", "told"),
    [
        *(
            ("a.txt", "is trained on too"),
            (".", "is trained on too"),
            ("../d/b/../a.txt", "is trained on too"),
        ),
        *(("../copy.txt", "4 of the first 4 samples"), ("../part.jsonl", "4 of the first 4 samples")),
        ("../held.txt", ""),
    ],
)
def test_held_out_text_that_is_trained_on_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, valid: str, told: str, order: str
) -> None:
    (tmp_path / "d" / "b").mkdir(parents=True)
    lines = [f"In the year {year} the ferry had {year % 7} horns.\n" for year in range(1900, 2000)]
    for name in ("d/a.txt", "copy.txt"):
        (tmp_path / name).write_text("".join(lines))
    (tmp_path / "part.jsonl").write_text(json.dumps({"text": "".join(lines[20:30])}))
    (tmp_path / "held.txt").write_text(WORDS * 20)
    config = config_of(tmp_path / "d", order=order, valid=str(tmp_path / "d" / valid), valid_every=1)
    assert len(held_out_samples(config, load_data(config))) > 0
    assert (" text that is known" in caplog.text) == bool(told) and told in caplog.text


@pytest.mark.parametrize(
    ("other", "told"), [("a.txt", 1), (".", 1), ("b/../a.txt", 1), ("b", 0), ("b/c.txt", 1)]
)
def test_sources_that_are_named_twice_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, other: str, told: int
) -> None:
    (tmp_path / "b").mkdir()
    for name in ("a.txt", "b/c.txt"):
        (tmp_path / name).write_text(WORDS * 20)
    config = config_of(tmp_path, sources=(str(tmp_path / "a.txt"), str(tmp_path / other)))
    load_data(config).close()
    assert caplog.text.count("which are read twice") == told


@pytest.mark.parametrize(("valid", "told"), [("absent.txt", True), ("", False)])
def test_held_out_text_that_is_never_measured_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, valid: str, told: bool
) -> None:
    (tmp_path / "a.txt").write_text(WORDS * 20)
    config = config_of(tmp_path / "a.txt", order="whole", valid=valid, valid_every=0)
    assert len(held_out_samples(config, load_data(config))) == 0
    assert ("data.valid_every is 0" in caplog.text) == told


def test_lines_that_are_no_table_are_text(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("One, two.\nThree.\n")
    (tmp_path / "b.txt").write_text("id,body\n1,one\n")
    assert texts_of(tmp_path) == [b"One, two.\nThree.\n", b"id,body\n1,one\n"]


@pytest.mark.parametrize("kind", [pyarrow.ListArray, pyarrow.LargeListArray])
def test_times_of_messages_do_no_harm(tmp_path: Path, kind: Any) -> None:
    """Even those that Python cannot hold."""
    times = pyarrow.array([10**15, 0], pyarrow.int64()).cast(pyarrow.timestamp("s", tz="Moon/Tycho"))
    days = pyarrow.array([-1_000_000, 0], pyarrow.int32()).cast(pyarrow.date32())
    turns = pyarrow.StructArray.from_arrays(
        [pyarrow.array(["user", "assistant"]), pyarrow.array(["a", "b"]), times, days],
        names=["role", "content", "at", "day"],
    )
    talk = kind.from_arrays([0, 2], turns)
    pyarrow.parquet.write_table(pyarrow.table({"messages": talk}), tmp_path / "a.parquet")
    section = config_of(tmp_path / "a.parquet", format="chat").data
    ((_, row),) = read_rows(list_source(section.path).shards[0], section, skips=False)
    assert isinstance(row, dict)
    assert [(turn["content"], turn["at"], turn["day"]) for turn in row["messages"]] == [
        ("a", 10**18, -1_000_000),
        ("b", 0, 0),
    ]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_json_of_arrows_own_type_is_what_it_says(tmp_path: Path, name: str) -> None:
    """`datasets` stores values of several kinds so. Their quotes would be trained on."""

    def as_json(*values: object) -> Any:
        text = pyarrow.array([json.dumps(value) for value in values])
        return pyarrow.ExtensionArray.from_storage(pyarrow.json_(), text)

    parts = [{"type": "text", "text": 'b"'}]
    turns = pyarrow.StructArray.from_arrays(
        [pyarrow.array(["user", "assistant"]), as_json("a", parts)], names=["role", "content"]
    )
    table = pyarrow.table(
        {
            "messages": pyarrow.ListArray.from_arrays([0, 2], turns),
            "tools": pyarrow.ListArray.from_arrays([0, 1], as_json({"name": "f"})),
        }
    )
    if name == "a.parquet":
        pyarrow.parquet.write_table(table, tmp_path / name)
    else:
        with pyarrow.ipc.new_stream(tmp_path / name, table.schema) as writer:
            writer.write_table(table)
    section = config_of(tmp_path / name, format="chat").data
    ((_, row),) = read_rows(list_source(section.path).shards[0], section, skips=False)
    assert isinstance(row, dict)
    assert [turn["content"] for turn in row["messages"]] == ["a", parts] and row["tools"] == [{"name": "f"}]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
@pytest.mark.timeout(20)
def test_tokens_and_labels_of_rows_are_not_passed_over_in_silence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    tokens = {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}

    def write(row: dict[str, Any]) -> Path:
        rows = [row] * 9
        if name == "a.jsonl":
            (tmp_path / name).write_bytes(jsonl(rows))
        else:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / name)
        return tmp_path / name

    assert texts_of(write({"text": WORDS, "labels": [0, 3]})) == [WORDS.encode()] * 9
    assert "labels" not in caplog.text, "classes of a text"
    if name == "a.jsonl":
        assert texts_of(write({"text": WORDS, "labels": [-100, 3]})) == [WORDS.encode()] * 9
        assert "labels of tokens" in caplog.text
        caplog.clear()
        documents._say_tokens.cache_clear()
    assert texts_of(write({"text": WORDS, **tokens})) == [WORDS.encode()] * 9
    assert "labels of tokens" in caplog.text
    with pytest.raises(DataError, match=r"\.npy"):
        texts_of(write(tokens))


def test_pictures_are_looked_at_and_not_read(tmp_path: Path) -> None:
    talk = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]] * 3
    images = [[{"bytes": b"\xff\0", "path": None}], [], None]
    table = pyarrow.table({"messages": talk, "images": images, "image": [None, b"\xff", None]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    section = config_of(tmp_path / "a.parquet", format="chat").data
    (shard,) = list_source(section.path).shards
    rows = [row for _, row in read_rows(shard, section, skips=False)]
    assert [(row["images"], row["image"]) for row in rows if isinstance(row, dict)] == [
        (True, False),
        (False, True),
        (False, False),
    ]
    pyarrow.parquet.write_table(table.drop_columns(["messages"]), tmp_path / "b.parquet")
    with pytest.raises(DataError, match="holds no conversations"):
        list(read_rows(list_source(str(tmp_path / "b.parquet")).shards[0], section, skips=False))


@pytest.mark.parametrize("columns", [("query", "answers"), ("response",), ("system", "tools")])
def test_a_table_with_half_of_a_conversation_is_named_with_all_its_columns(
    columns: tuple[str, ...], tmp_path: Path
) -> None:
    pyarrow.parquet.write_table(pyarrow.table({name: ["a"] for name in columns}), tmp_path / "a.parquet")
    section = config_of(tmp_path / "a.parquet", format="chat").data
    with pytest.raises(DataError, match=", ".join(map(repr, columns))):
        list(read_rows(list_source(section.path).shards[0], section, skips=False))


def test_text_of_a_binary_column_is_utf_8(tmp_path: Path) -> None:
    table = pyarrow.table({"text": [b"one", "two".encode("utf-16-le")]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"row 2: column 'text' .*zero bytes"):
        texts_of(tmp_path / "a.parquet")


def test_only_the_columns_that_are_needed_are_read(tmp_path: Path) -> None:
    odd = pyarrow.array([-1_000_000] * 5, pyarrow.int32()).cast(pyarrow.date32())
    nano = pyarrow.array([1] * 5, pyarrow.timestamp("ns", tz="Moon/Tycho"))
    talk = [[{"role": "user", "content": "a"}]] * 5
    table = pyarrow.table(
        {
            "odd": odd,
            "text": [row["text"] for row in ROWS],
            "raw": pyarrow.array(TEXTS),
            "none": pyarrow.nulls(5),
            "messages": talk,
            "at": nano,
        }
    )
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pyarrow.ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    for path in (tmp_path / "a.parquet", tmp_path / "a.arrow"):
        assert texts_of(path) == TEXTS == texts_of(path, jsonl_field="raw")
        assert texts_of(path, jsonl_field="none") == []
        with pytest.raises(DataError, match=r"(?s)date32.*not text.*of 'text', 'raw', 'none'"):
            texts_of(path, jsonl_field="odd")
        with pytest.raises(DataError, match=r"(?s)no column 'absent'.*of 'text', 'raw', 'none'"):
            texts_of(path, jsonl_field="absent")
        (shard,) = list_source(str(path)).shards
        rows = [row for _, row in read_rows(shard, DataSection(format="chat"), skips=False)]
        assert rows == [{"messages": one} for one in talk]


def test_rows_that_are_left_out_are_counted(tmp_path: Path) -> None:
    rows = [*ROWS, {"text": None}, {"text": " "}, None, {"text": ""}, {"text": "\u00a0\u2003"}]
    (tmp_path / "a.jsonl").write_bytes(jsonl(rows))
    expected = {"null": 2, "empty": 3}
    for order in ("whole", "shards"):
        corpus = load_data(config_of(tmp_path / "a.jsonl", order=order))
        assert corpus.dropped == expected
        corpus.close()
    (tmp_path / "b.jsonl").write_bytes(jsonl(rows[5:]))
    for order in ("whole", "shards"):
        with pytest.raises(DataError, match="3 x empty, 2 x null"):
            load_data(config_of(tmp_path / "b.jsonl", order=order))


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
def test_a_number_that_is_none_counts_as_null(tmp_path: Path, kind: str) -> None:
    """pandas writes NaN for a field that a row does not have."""
    nan = float("nan")
    rows = [{"instruction": "How warm?", "input": nan, "output": "Seven.", "text": "a"}] * 5
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    else:
        rows.append({**rows[0], "text": nan})
        text = json.dumps(rows) if kind == "json" else "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"a.{kind}").write_text(text)
        assert texts_of(tmp_path / f"a.{kind}") == [b"a"] * 5
    (shard,) = list_source(str(tmp_path / f"a.{kind}")).shards
    for _, row in read_rows(shard, DataSection(format="chat"), skips=False):
        assert isinstance(row, dict) and row["input"] is None


def test_tokens_are_made_again_when_an_input_changes(tmp_path: Path) -> None:
    path, tokenizer = tmp_path / "a.jsonl", write_tokenizer(tmp_path / "tokenizer")
    path.write_bytes(jsonl(ROWS))
    base = config_of(path, tokenizer=str(tokenizer))
    base = replace(base, model=replace(base.model, vocab=400))

    def folder(config: RunConfig) -> tuple[str, Path]:
        corpus = load_data(config)
        assert isinstance(corpus, ShardedCorpus)
        corpus.close()
        return corpus.fingerprint(), corpus.streams[0].tokenized._folder

    before = folder(base)
    assert folder(base) == before
    os.utime(path, ns=(1, 1))
    touched = folder(base)
    assert touched[0] == before[0] and touched[1] != before[1], "the run's text is the same by its listing"
    tables = json.loads((tokenizer / "tokenizer.json").read_text())
    (token,) = [one for one in tables["added_tokens"] if one["content"] == "<|endoftext|>"]
    token["content"] = "<|finis|>"
    tables["model"]["vocab"]["<|finis|>"] = tables["model"]["vocab"].pop("<|endoftext|>")
    (tokenizer / "tokenizer.json").write_text(json.dumps(tables))
    (tokenizer / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|finis|>"}))
    assert folder(base)[0] != before[0]


class _Strange(Exception):
    pass


@pytest.mark.parametrize("error", [DataError("row 7"), _Strange("odd"), StopIteration("end"), MemoryError()])
def test_whatever_fails_beside_training_reaches_the_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl([{"text": f"{number} {WORDS}"} for number in range(400)]))
    monkeypatch.setattr(documents, "SHARD_BYTES", 2000)
    corpus = load_data(config_of(tmp_path / "a.jsonl"))
    assert isinstance(corpus, ShardedCorpus)
    (stream,) = corpus.streams
    real = documents.text_of

    def fails(row: Any, place: str, data: DataSection) -> bytes:
        raise error

    assert real is text_of
    monkeypatch.setattr("node.data.shards.text_of", fails)
    corpus.batch(0)
    assert corpus._worker is not None
    corpus._worker.join(20)
    assert not corpus._worker.is_alive() and stream.failure is not None
    expected = RuntimeError if isinstance(error, StopIteration) else type(error)
    for _ in range(2):
        with pytest.raises(expected):
            packed_parts(corpus, [1], BatchPart.INPUTS)
        with pytest.raises(expected):
            stream.extend()
    corpus.close()


@pytest.mark.parametrize("at", [2, 4], ids=["of a row", "the last"])
@pytest.mark.parametrize("column", [["abc"] * 4, [[1, 2, 3]] * 4], ids=["text", "lists"])
def test_damaged_offsets_of_arrow_do_not_end_the_process(tmp_path: Path, column: Any, at: int) -> None:
    path = tmp_path / "a.arrow"
    table = pyarrow.table({"messages": pyarrow.array(column)})
    with pyarrow.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)
    offsets = [0, 3, 6, 9, 12]
    damaged = [*offsets[:at], 1 << 30, *offsets[at + 1 :]]
    old, new = (np.array(numbers, np.int32).tobytes() for numbers in (offsets, damaged))
    path.write_bytes(path.read_bytes().replace(old, new))
    section = config_of(path, format="chat").data
    with pytest.raises(DataError, match="is not an Arrow file, or damaged"):
        list(read_rows(list_source(section.path).shards[0], section, skips=False))


VALUES = st.one_of(
    st.none(),
    st.text(max_size=20),
    st.integers(),
    st.floats(),
    st.booleans(),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2),
)
COLUMNS = st.sampled_from(
    [
        pyarrow.array([WORDS, None]),
        pyarrow.array([WORDS.encode(), b"\xff"]),
        pyarrow.array([WORDS, WORDS]).dictionary_encode(),
        pyarrow.array([WORDS, WORDS], pyarrow.large_string()),
        pyarrow.StringArray.from_buffers(
            2, pyarrow.py_buffer(np.array([0, 1, 2], np.int32)), pyarrow.py_buffer(b"a\xff")
        ),
        pyarrow.array([[1], None]),
        pyarrow.array([{"a": 1}, None]),
        pyarrow.array([float("nan"), 1.0]),
        pyarrow.array([1, -1_000_000], pyarrow.int32()).cast(pyarrow.date32()),
        pyarrow.array([1, 2**62], pyarrow.timestamp("ns")),
        pyarrow.nulls(2),
    ]
)


def _one_line_or_texts(path: Path, good: int) -> None:
    for order in ("whole", "shards"):
        try:
            corpus = load_data(config_of(path, order=order))
        except DataError as error:
            assert "\n" not in str(error) and str(path) in str(error)
        else:
            assert sum(corpus.dropped.values()) <= 2 + good
            corpus.close()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    VALUES, st.integers(0, 5), st.sampled_from(["line", "value", "array", "bytes"]), st.binary(max_size=12)
)
def test_a_bad_row_anywhere_in_json_is_left_out_or_one_line(
    tmp_path: Path, value: Any, at: int, kind: str, junk: bytes
) -> None:
    rows: list[Any] = [*ROWS]
    rows.insert(at, value if kind == "line" else {"text": value})
    path = tmp_path / "a.json"
    content = json.dumps(rows).encode() if kind == "array" else jsonl(rows)
    if kind == "bytes":
        middle = len(content) * at // 6
        content = content[:middle] + junk + content[middle:]
    path.write_bytes(content)
    _one_line_or_texts(path, len(ROWS))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(COLUMNS, COLUMNS, st.sampled_from(["parquet", "arrow"]), st.integers(0, 400), st.booleans())
def test_any_column_of_a_table_is_read_or_one_line(
    tmp_path: Path, column: Any, beside: Any, kind: str, damage: int, damaged: bool
) -> None:
    path = tmp_path / f"a.{kind}"
    table = pyarrow.table({"text": column, "beside": beside})
    if kind == "parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        with pyarrow.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table)
    if damaged:
        path.write_bytes(path.read_bytes()[: damage * 4])
    _one_line_or_texts(path, 2)
