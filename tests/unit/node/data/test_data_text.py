"""Reading text: accepted files, and one clear line for each refused one."""

import gzip
import json
import logging
import lzma
import os
from pathlib import Path

import pytest

from node.config.schema import DataSection
from node.data import documents, text
from node.data.documents import read_text
from tests.support.full_disk import full_disk
from wire.errors import DataError


def read(path: Path | str, field: str = "text") -> bytes:
    return read_text(DataSection(path=str(path), jsonl_field=field))


def refused(path: Path | str, message: str, field: str = "text") -> None:
    with pytest.raises(DataError, match=message) as caught:
        read(path, field)
    assert "\n" not in str(caught.value)


def test_a_text_file_is_read_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "any.name"
    for ending, reports in (("\n", 0), ("\r\n", 1)):
        path.write_bytes(f"Grüße{ending}".encode())
        assert [read(path), read(path)] == [f"Grüße{ending}".encode()] * 2
        assert len(caplog.records) == reports


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"body": "first"}, {"body": "zero\0byte"}, {"body": " "}, {"body": "last", "text": 1}]
    path.write_text("\n\n".join(json.dumps(row) for row in rows) + "\n")
    assert read(path, "body") == b"first\0zero byte\0last"


def test_a_folder_is_read_in_order_of_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x.md").write_text("three")
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "aa.jsonl").write_text('{"text": "two"}')
    (tmp_path / "c.txt.xz").write_bytes(lzma.compress(b"four"))
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "picture.png").write_text("never read")
    (tmp_path / ".hidden.txt").write_text("never read")
    (tmp_path / "latin.txt").write_bytes("Grüße".encode("latin-1"))
    (tmp_path / "zeros.txt").write_bytes(b"a\0b")
    with caplog.at_level(logging.WARNING):
        assert read(tmp_path) == b"one\0two\0three\0four"
    skipped = [record.getMessage() for record in caplog.records]
    assert len(skipped) == 4 and "beside files of rows" in skipped.pop(0)
    assert skipped[0].startswith("training on 7 of 9 files in ")
    assert skipped[0].endswith("skipped: 1 x hidden, 1 x .png")
    assert "latin.txt is not UTF-8 text" in skipped[1] and "(byte 2)" in skipped[1]
    assert "zeros.txt holds zero bytes" in skipped[2]


def test_the_standard_library_needs_no_path() -> None:
    content = read("stdlib")
    assert 1_000_000 < len(content) <= text.STDLIB_LIMIT_BYTES + 10_000
    assert b"class JSONDecoder" in content
    assert content == read("stdlib")


def test_the_standard_library_is_cut_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "STDLIB_LIMIT_BYTES", 50_000)
    cut = read("stdlib")
    assert sum(map(len, cut.split(b"\0"))) <= 50_000


def test_unreadable_files(tmp_path: Path) -> None:
    refused(tmp_path / "none.txt", "no file or folder .*none.txt; .* data.path=PATH after the command")
    refused(Path("hf://datasets/owner/name"), "is an address: download")
    (tmp_path / "empty.txt").write_text(" \n")
    refused(tmp_path / "empty.txt", "no text in .*empty.txt")
    (tmp_path / "binary.bin").write_bytes(b"\xff\x00")
    refused(tmp_path / "binary.bin", "is not UTF-8 text")
    (tmp_path / "zeros.bin").write_bytes(b"\0\0")
    refused(tmp_path / "zeros.bin", "zero bytes")
    folder = tmp_path / "folder"
    folder.mkdir()
    refused(folder, "no text files in folder")
    (folder / "link.txt").symlink_to(tmp_path / "empty.txt")
    refused(folder, r"no text files in folder .* \(skipped: 1 x link out of the folder\)")
    (folder / "bad.txt").write_bytes(b"\xff")
    refused(folder, "no text in .*folder")


@pytest.mark.parametrize("suffix", [".xz", ".gz"])
def test_damaged_compression(tmp_path: Path, suffix: str) -> None:
    good = (lzma if suffix == ".xz" else gzip).compress(bytes(range(1, 100)) * 50)
    path = tmp_path / f"a.txt{suffix}"
    for content in (good[:-9], b"not compressed at all", good[:20] + b"\x55" * 20 + good[40:]):
        path.write_bytes(content)
        refused(path, "is damaged")


def test_what_lies_in_a_folder_that_may_not_be_entered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(self: Path, **_: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    (tmp_path / "link.txt").symlink_to("locked/text.txt")
    whole = Path.stat

    def stat(self: Path, **options: bool) -> os.stat_result:
        return whole(self, **options) if self == tmp_path else denied(self)

    monkeypatch.setattr(Path, "stat", stat)
    refused(tmp_path / "locked" / "text.txt", "cannot read .*text.txt: Permission denied; check")
    refused(tmp_path, "cannot read .*link.txt: Permission denied; check")


def test_a_full_disk_leaves_no_part_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with full_disk(5), pytest.raises(OSError) as raised:
        text.write_whole(path, "too long")
    assert raised.value.filename == str(path) and not [*tmp_path.iterdir()]
    text.write_whole(path, "before")
    with full_disk(5), pytest.raises(OSError):
        text.write_whole(path, "too long")
    assert path.read_text() == "before" and [*tmp_path.iterdir()] == [path]


def test_what_is_no_file_of_its_own_is_written_to_directly(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    link.symlink_to(target)
    text.write_whole(link, "text")
    assert link.is_symlink() and target.read_text() == "text"
    text.write_whole(Path(os.devnull), "text")
    assert Path(os.devnull).is_char_device()
