"""Data in shards: every kind of file, an order that a seed decides, and tokenizing beside training."""

import gzip
import io
import json
import lzma
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
import zstandard

from node.config.schema import DataSection, ModelSection, RunConfig, RunSection, TrainingSection
from node.data import documents, shards
from node.data.data import Corpus
from node.data.documents import list_source
from node.data.shards import ShardedCorpus, in_shards, load_data
from node.view.explain import text_plan
from tests.support.chat_data import write_tokenizer
from tests.support.paths import python_path
from wire.errors import ConfigError, DataError

SEQUENCE = 16
TEXTS = [
    f"document {number}: " + " ".join(str(number * k) for k in range(30 + number % 7))
    for number in range(300)
]


@pytest.fixture(autouse=True)
def _small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards, parts and batches that a test's text fills several of."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(documents, "SHARD_BYTES", 4000)
    monkeypatch.setattr(documents, "TOKEN_BYTES", 2000)
    monkeypatch.setattr(documents, "SMALL_BYTES", 2000)
    monkeypatch.setattr(shards, "PART_TOKENS", 1500)
    monkeypatch.setattr(documents, "BATCH_DOCUMENTS", 4)
    monkeypatch.setattr(shards, "GROUP_PARTS", 2)


def config_of(*, seed: int = 0, vocab: int = 256, **data: object) -> RunConfig:
    return RunConfig(
        run=RunSection(seed=seed),
        model=ModelSection(vocab=vocab, sequence=SEQUENCE),
        data=DataSection(**{"order": "shards", **data}),  # type: ignore[arg-type]
        training=TrainingSection(global_batch=8),
    )


def sharded(config: RunConfig) -> ShardedCorpus:
    corpus = load_data(config)
    assert isinstance(corpus, ShardedCorpus)
    return corpus


def jsonl(texts: list[str], field: str = "text") -> bytes:
    return "".join(json.dumps({field: text}) + "\n" for text in texts).encode()


def write(path: Path, texts: list[str]) -> Path:
    """`texts` as the file's name wants them."""
    content = jsonl(texts) if ".jsonl" in path.name else "\n".join(texts).encode()
    match path.suffix:
        case ".gz":
            path.write_bytes(gzip.compress(content))
        case ".xz":
            path.write_bytes(lzma.compress(content))
        case ".zst":
            path.write_bytes(zstandard.ZstdCompressor().compress(content))
        case ".parquet":
            table = pyarrow.table({"text": texts, "number": list(range(len(texts)))})
            pyarrow.parquet.write_table(table, path, row_group_size=40)
        case ".arrow":
            # A stream as `datasets` saves it, or a file.
            schema = pyarrow.schema({"text": pyarrow.string()})
            made = pyarrow.ipc.new_file if path.stem == "file" else pyarrow.ipc.new_stream
            with made(path, schema) as writer:
                writer.write_table(pyarrow.table({"text": texts}), max_chunksize=40)
        case ".npy":
            np.save(path, np.frombuffer(content, np.uint8).astype(np.int32))
        case ".bin":
            np.frombuffer(content, np.uint8).astype("<u2").tofile(path)
        case _:
            path.write_bytes(content)
    return path


def one_pass(corpus: ShardedCorpus) -> list[bytes]:
    """The windows of a source's first pass, without the token that each shares with the next."""
    (stream,) = corpus.streams
    groups = 0
    seen: dict[tuple[int, int, int], bytes] = {}
    while True:
        stream.extend()
        for number in range(groups, stream.groups):
            group = stream._groups[number]
            for at, place in enumerate(group.places):
                if place in seen:
                    return list(seen.values())
                seen[place] = stream.window(group.first + at)[0][:-1].astype(np.uint8).tobytes()
        groups = stream.groups


NAMES = [
    "a.txt",
    "a.jsonl",
    "a.jsonl.gz",
    "a.jsonl.xz",
    "a.jsonl.zst",
    "a.txt.zst",
    "a.parquet",
    "a.arrow",
    "file.arrow",
    "a.npy",
    "a.bin",
]


def test_ids_of_64_bits_are_not_taken_for_32_and_a_part_of_one_id_is_read(tmp_path: Path) -> None:
    ids = np.arange(1001)
    ids.astype("<u4").tofile(tmp_path / "a.bin")
    config = config_of(path=str(tmp_path / "a.bin"), vocab=100_000)
    assert one_pass(sharded(config))
    ids.astype("<u8").tofile(tmp_path / "a.bin")
    with pytest.raises(DataError, match="ids of 64 bits"):
        load_data(config)
    (tmp_path / "b.bin").write_bytes(b"\x05\0" * 1001)  # with parts of 2,000 bytes, as tests have them
    assert one_pass(sharded(config_of(path=str(tmp_path / "b.bin"))))


@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_file_is_read_whole(tmp_path: Path, name: str) -> None:
    corpus = sharded(config_of(path=str(write(tmp_path / name, TEXTS))))
    windows = one_pass(corpus)
    size = len("\0".join(TEXTS).encode())
    # Less than a window is lost at the end of each part; rows of JSONL in a token file are longer than texts.
    assert 0.95 * size < len(b"".join(windows)) < 1.01 * size + len(TEXTS)
    assert sum(b"document" in window for window in windows) > len(TEXTS) / 3


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet", "a.arrow", "file.arrow"])
def test_tokens_of_a_shard_are_the_documents_with_an_end_of_text_between(tmp_path: Path, name: str) -> None:
    config = config_of(path=str(write(tmp_path / name, TEXTS)))
    source = sharded(config).streams[0].tokenized
    found = b""
    for number in range(len(source.source.shards)):
        part = 0
        while source.counts(number, part) is not None:
            found += source.part(number, part).tokens.tobytes()
            part += 1
    assert found == "".join(f"{text}\0" for text in TEXTS).encode()


def test_a_run_of_an_earlier_version_has_the_same_text(tmp_path: Path) -> None:
    """What a run directory recorded when file formats of tokens on disk were others: it can be resumed."""
    path = write(tmp_path / "a.jsonl", [f"The ferry leaves at {number}. " * 4 for number in range(40)])
    corpus = sharded(config_of(path=str(path)))
    corpus.close()
    assert corpus.fingerprint() == "21c02b93b0a1040e87793e0e3a0e0969e05ba23b3bf5e80d83bf745bd29cf523"


def test_the_order_follows_from_the_seed_and_the_listing(tmp_path: Path) -> None:
    config = config_of(path=str(write(tmp_path / "a.jsonl", TEXTS)))
    first, again, other = (
        sharded(config),
        sharded(config),
        sharded(replace(config, run=RunSection(seed=1))),
    )
    # Any order of asking, and what is tokenized ahead meanwhile, gives the same batches.
    steps = [0, 7, 3, 40, 1]
    batches = {step: first.batch(step) for step in sorted(steps)}
    for step in steps:
        assert np.array_equal(again.batch(step), batches[step])
    assert not np.array_equal(other.batch(0), batches[0])
    assert first.fingerprint() == again.fingerprint()
    write(tmp_path / "a.jsonl", TEXTS[:-1])
    assert sharded(config).fingerprint() != first.fingerprint()
    for corpus in (first, again, other):
        corpus.close()


def test_a_resume_reads_the_tokens_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the middle of a compressed file, whose parts come one after the other."""
    config = config_of(path=str(write(tmp_path / "a.jsonl.gz", TEXTS)))
    first = sharded(config)
    expected = [first.batch(step) for step in range(60)]
    first.close()
    parts = first.streams[0].tokenized._folder
    # How many there are depends on how far a thread went ahead; the steps need more than two.
    kept = sorted(parts.glob("*.json"))
    for path in kept[2:]:
        path.unlink()
    made: list[tuple[int, int]] = []
    real = shards.TokenizedSource._make

    def counted(self: shards.TokenizedSource, shard: int, part: int) -> shards.Counts:
        made.append((shard, part))
        return real(self, shard, part)

    monkeypatch.setattr(shards.TokenizedSource, "_make", counted)
    resumed = sharded(config)
    assert all(np.array_equal(resumed.batch(step), batch) for step, batch in enumerate(expected))
    resumed.close()
    names = {f"{shard:06}.{part:04}.json" for shard, part in made}
    assert names and not names & {path.name for path in kept[:2]}


def test_passes_differ_and_never_end(tmp_path: Path) -> None:
    corpus = sharded(config_of(path=str(write(tmp_path / "a.jsonl", TEXTS[:40]))))
    (stream,) = corpus.streams
    windows = len(one_pass(corpus))
    first = [stream.window(index)[0].tobytes() for index in range(windows)]
    second = [stream.window(windows + index)[0].tobytes() for index in range(windows)]
    assert sorted(first) == sorted(second) and first != second


def test_the_first_step_needs_the_first_group_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "GROUPS_AHEAD", 1)
    corpus = sharded(config_of(path=str(write(tmp_path / "a.jsonl", TEXTS))))
    source = corpus.streams[0].tokenized
    assert corpus.streams[0].groups == 1
    tokenized = len(list(source._folder.glob("*.json")))
    assert tokenized <= 2 < len(source.source.shards)
    corpus.batch(0)
    corpus.close()
    assert len(list(source._folder.glob("*.json"))) < len(source.source.shards), "no more than it is asked to"


@pytest.mark.parametrize("left", [0, 0.5, 0.99])
@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_a_file_that_shrinks_during_a_run_is_reported(tmp_path: Path, name: str, left: float) -> None:
    path = write(tmp_path / name, TEXTS)
    (stream,) = sharded(config_of(path=str(path))).streams
    os.truncate(path, int(left * path.stat().st_size))
    with pytest.raises(DataError, match=f"{name} is shorter than at the start"):
        list(stream.in_order(10_000))


@pytest.mark.parametrize("left", [0, 0.5])
@pytest.mark.parametrize("name", ["a.bin", "a.npy"])
def test_a_token_file_that_shrinks_during_a_run_does_not_end_the_process(
    tmp_path: Path, name: str, left: float
) -> None:
    ids = np.arange(1 << 16, dtype=np.uint16) % 200
    np.save(tmp_path / name, ids) if name == "a.npy" else ids.tofile(tmp_path / name)
    (stream,) = sharded(config_of(path=str(tmp_path / name))).streams
    os.truncate(tmp_path / name, int(left * ids.nbytes))
    with pytest.raises(DataError, match=f"{name} is shorter than at the start"):
        for index in range(1000):
            stream.window(index)


def test_a_file_that_changes_during_a_run_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "a.jsonl", TEXTS)
    (stream,) = sharded(config_of(path=str(path))).streams
    assert "was changed" not in caplog.text
    os.utime(path, ns=(0, 0))
    list(stream.in_order(10_000))
    assert caplog.text.count("a.jsonl was changed while the run reads it") == 1


LARGE = """
import hashlib, resource, sys
from node.config.schema import DataSection, ModelSection, RunConfig, TrainingSection
from node.data.shards import load_data
from wire.errors import DataError

def read(order):
    config = RunConfig(
        model=ModelSection(vocab=256, sequence=512),
        data=DataSection(path=sys.argv[1], order=order),
        training=TrainingSection(global_batch=8),
    )
    corpus = load_data(config)
    digest = hashlib.sha256()
    for step in range(3):
        digest.update(corpus.inputs(step).tobytes() + corpus.labels(step).tobytes())
    corpus.close()
    return digest.hexdigest()

with open("/proc/self/status") as file:
    (now,) = (int(line.split()[1]) << 10 for line in file if line.startswith("VmData"))
most = now + (96 << 20)
resource.setrlimit(resource.RLIMIT_DATA, (most, most))
print(read("shards"), read("shards"))
try:
    read("whole")
except DataError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not limit a process's data")
def test_a_corpus_larger_than_memory_is_read_and_read_again(tmp_path: Path) -> None:
    """By a process that may take 96 MiB more than after its imports, of a text of 160 MB."""
    path = tmp_path / "large.txt"
    block = b"".join(b"%08d what a line of a large text says\n" % number for number in range(100_000))
    with path.open("wb") as file:
        while file.tell() < 160_000_000:
            file.write(block)
    environment = {**os.environ, "PYTHONPATH": python_path()}
    command = [sys.executable, "-c", LARGE, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    first, again, *rest = done.stdout.split(maxsplit=2)
    assert first == again and len(first) == 64, "tokens that are there give the same samples"
    assert rest == [f'the text at {path} does not fit in the memory: set [data] order to "shards"\n']
    kept = sum(file.stat().st_size for file in (tmp_path / "cache").rglob("*.tokens"))
    assert 0 < kept < path.stat().st_size, "the rest is tokenized when it is needed"


def test_sources_are_mixed_by_weight(tmp_path: Path) -> None:
    names = [
        str(write(tmp_path / name, [letter * 90] * 80)) for name, letter in (("a.jsonl", "a"), ("b.txt", "b"))
    ]
    corpus = sharded(config_of(sources=tuple(names), weights=(3.0, 1.0)))
    tokens = np.concatenate([corpus.batch(step) for step in range(64)])
    corpus.close()
    share = (tokens == ord("b")).any(1).mean()
    assert 0.2 < share < 0.3
    mixture = corpus._mixture
    seen = [mixture.source_of(sample) for sample in range(3000)]
    for source in (0, 1):
        assert [index for which, index in seen if which == source] == list(
            range(sum(which == source for which, _ in seen))
        ), "no sample of a source is left out"


def test_small_files_share_a_shard(tmp_path: Path) -> None:
    for number in range(90):
        (tmp_path / f"{number:02}.txt").write_text(TEXTS[number])
    source = list_source(str(tmp_path))
    assert 1 < len(source.shards) < 10
    assert sum(len(shard.extents) for shard in source.shards) == 90


@pytest.mark.parametrize("suffix", ["txt.gz", "parquet", "arrow", "npy", "bin"])
def test_small_files_lose_no_tokens_at_their_ends(tmp_path: Path, suffix: str) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    for number in range(60):
        write(folder / f"{number}.{suffix}", ["short"])
    (stream,) = sharded(config_of(path=str(folder))).streams
    joined = sum(len(window) - 1 for window, _ in stream.in_order(1000))
    assert joined >= 60 * len("short") - SEQUENCE * len(stream.tokenized.source.shards)
    assert len(stream.tokenized.source.shards) <= 15


def test_small_row_groups_share_a_shard(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), path, row_group_size=1)
    (stream,) = sharded(config_of(path=str(path))).streams
    source = stream.tokenized.source
    (first, *_) = source.shards
    rows = [place for place, _ in documents.read_rows(first, DataSection(), skips=False)]
    assert 1 < len(rows) < 30 and 10 < len(source.shards) < 100
    assert rows[1] == f"{path} row group 1 row 1"
    joined = sum(len(window) - 1 for window, _ in stream.in_order(10_000))
    assert joined > len("".join(TEXTS)) - SEQUENCE * len(source.shards)


@pytest.mark.parametrize(
    ("names", "changed"),
    [
        (("0.txt", "1.txt", "2.txt"), False),
        (("0.txt.gz",), False),
        (("0.txt.gz", "1.txt.gz", "2.txt.gz"), True),
        (("0.txt", "1.txt.gz"), True),
        (("0.txt.gz", "1.txt"), True),
        (("0.npy", "1.npy", "2.npy"), True),
        (("0.parquet",), True),
    ],
)
def test_a_run_whose_samples_were_others_before_small_parts_were_joined_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], changed: bool
) -> None:
    """By the digest that a resumed run compares."""
    for name in names:
        write(tmp_path / name, ["short"])
    if names == ("0.parquet",):
        table = pyarrow.table({"text": TEXTS[:4]})
        pyarrow.parquet.write_table(table, tmp_path / names[0], row_group_size=1)
    found = list_source(str(tmp_path)).digest
    monkeypatch.setattr(documents, "SMALL_BYTES", 0)
    assert (list_source(str(tmp_path)).digest != found) == changed


def parquet(columns: dict[str, list[str]]) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), file)
    return file.getvalue()


def saved(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "error", "words"),
    [
        ("gone.jsonl", None, DataError, "no file or folder"),
        ("a.jsonl", b"{}\n", DataError, "line 1 has no text in field 'text'"),
        ("a.jsonl", b'{"messages": []}\n', DataError, 'format to "chat"'),
        ("a.parquet", parquet({"prompt": ["a"], "output": ["b"]}), DataError, 'format to "chat"'),
        ("a.jsonl", b"1\n", DataError, "line 1 is not a JSON object"),
        ("a.jsonl", b"[1]\n", DataError, "row 1 is not a JSON object"),
        ("a.json", b'[{"text": "a"}, {"text"', DataError, "after row 1"),
        ("a.json", b'[{"text": "a"}, {}]', DataError, "row 2 has no text"),
        ("a.json", b'[{"text": "a"}] []', DataError, "after row 1"),
        ("a.json", b'{"text":\n"a"}', DataError, "neither an array"),
        ("a.jsonl", b'{"text"\n', DataError, "line 1 is not JSON .*: repair or remove it"),
        ("a.jsonl", b'{"text": "a"},\n', DataError, "line 1 is not JSON .*: remove what follows"),
        ("a.jsonl", b'{"text": "\xe9"}\n', DataError, "line 1 is not JSON .*, in UTF-8"),
        ("a.txt", b"\xff\xfe" * 40, DataError, "is UTF-16"),
        ("a.txt", b"\xff" * 40, DataError, "is not UTF-8 text"),
        ("a.jsonl.gz", b"nonsense", DataError, "is damaged: .* or rename it"),
        ("a.jsonl.zst", b"nonsense", DataError, "is damaged"),
        ("a.parquet", b"nonsense", DataError, "is not parquet, or damaged .*: copy it again"),
        ("a.parquet", b"version https://git-lfs.github.com/spec/v1\noid", DataError, "git lfs pull"),
        ("a.arrow", b"nonsense", DataError, "is not an Arrow file, or damaged"),
        ("a.npy", b"nonsense", DataError, "has no header of NumPy: .* name it .bin"),
        ("a.npy", b"\x93NUMPY nonsense", DataError, "is not an array of token ids"),
        ("a.npy", b"version https://git-lfs.github.com/spec/v1\noid", DataError, "git lfs pull"),
        ("a.npy", 2 * saved(np.arange(50)), DataError, "has 528 bytes behind its array"),
        ("a.bin", b"\xff\xff" * 40, ConfigError, "has the token 65535, but model.vocab is 256"),
        ("a.txt", b"short", DataError, "no part of 17 tokens"),
        ("a.txt", b"", DataError, "all of its files are empty"),
    ],
)
def test_bad_files_are_one_line(
    tmp_path: Path, name: str, content: bytes | None, error: type[Exception], words: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(error, match=words) as raised:
        load_data(config_of(path=str(tmp_path / name)))
    assert "\n" not in str(raised.value) and str(tmp_path) in str(raised.value)


def test_damaged_tokens_are_found(tmp_path: Path) -> None:
    config = config_of(path=str(write(tmp_path / "a.jsonl", TEXTS)))
    source = sharded(config).streams[0].tokenized
    for path in source._folder.glob("*.tokens"):
        damaged = bytearray(path.read_bytes())
        damaged[5] ^= 1
        path.write_bytes(damaged)
    with pytest.raises(DataError, match="is damaged: delete"):
        sharded(config).batch(0)


def test_text_that_is_read_in_shards(tmp_path: Path) -> None:
    text, rows = write(tmp_path / "a.txt", TEXTS), write(tmp_path / "a.parquet", TEXTS)
    (tmp_path / "rows").mkdir()
    write(tmp_path / "rows" / "b.arrow", TEXTS)
    for path, expected in (("stdlib", False), (text, False), (rows, True), (tmp_path / "rows", True)):
        assert in_shards(DataSection(path=str(path))) is expected
    assert in_shards(DataSection(sources=(str(text),))) and in_shards(DataSection(format="chat"))
    assert isinstance(load_data(config_of(path=str(text), order="whole")), Corpus)


def test_a_byte_pair_tokenizer_ends_documents_with_its_end_of_text(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    config = config_of(vocab=400, path=str(write(tmp_path / "a.parquet", TEXTS)), tokenizer=str(tokenizer))
    source = sharded(config).streams[0].tokenized
    counts, part = source.counts(0, 0), source.part(0, 0)
    assert counts is not None and part.tokens.dtype == np.uint16
    assert int((part.tokens == 0).sum()) == counts.documents, "<|endoftext|> is token 0 there"
    with pytest.raises(ConfigError, match=r"model\.vocab to 400"):
        load_data(config_of(vocab=399, path=config.data.path, tokenizer=str(tokenizer)))


def test_explain_estimates_what_is_read_in_shards(tmp_path: Path) -> None:
    texts = [TEXTS[150]] * 300
    config = config_of(path=str(write(tmp_path / "a.parquet", texts)), order="auto")
    plan = text_plan(config, lambda _: None)
    size = len("\0".join(texts))
    assert plan.estimated and not plan.problem
    assert 0.75 * size < plan.tokens < 1.25 * size, "the last row group is shorter"
    gone = replace(config, data=replace(config.data, path=str(tmp_path / "gone.parquet")))
    assert "no file or folder" in text_plan(gone, lambda _: None).problem
