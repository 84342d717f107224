"""What the documents name is there: files, folders and modules, also in the lists of what a folder holds."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cases import each

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("kernels", "wire", "node")
DOCUMENTS = sorted(
    path.relative_to(ROOT)
    for folder in ("", *PACKAGES, "deploy", "scripts", "tests")
    for path in (ROOT / folder).glob("**/*.md" if folder else "*.md")
)
ENDINGS = r"\.(?:py|md|proto|toml|service|sql)"
FILE = re.compile(rf"[\w*./-]*[\w*-]{ENDINGS}|(?:[\w-]+/){{2,}}")
"""A path with an ending of ours, or a folder in a folder."""
FOLDER = re.compile(r"[\w-]+/")
MODULE = re.compile(rf"(?:{'|'.join(PACKAGES)})(?:\.\w+)+")
LISTED = re.compile(r"^ {4}(\S+(?:, \S+)*) {2,}\S", re.MULTILINE)
"""A line of a list of files: names, then what they are for."""
INSTALLED = ("/etc/", "/var/", "/opt/", "/usr/", "runs/", "RUN_DIR/")
"""Where a user's files lie, not ours."""


def commits_of(record: object, *, named: bool = False) -> Iterator[str]:
    """The commits that a record names, whatever stands behind them. `named`: the key above is a commit's."""
    if isinstance(record, dict):
        for key, value in record.items():
            yield from commits_of(value, named=named or "commit" in key)
    elif isinstance(record, list):
        for value in record:
            yield from commits_of(value, named=named)
    elif named and isinstance(record, str):
        yield re.split(r"\W", record)[0]


def prose(text: str) -> str:
    """Without generated tables: their names are checked where they are made."""
    return re.sub(r"<!-- table:.*?<!-- /table -->", "", text, flags=re.DOTALL)


def quoted(text: str) -> list[str]:
    """What stands in backticks."""
    return re.findall(r"`([^`\n]+)`", text)


def listed(text: str) -> list[str]:
    """What stands at the head of the lines of a list of files."""
    return [name for names in LISTED.findall(text) for name in names.split(", ")]


def is_there(name: str, folder: Path) -> bool:
    """Whether a file is at this path from the document or the root, or, without a folder, anywhere below."""
    starts = [folder, ROOT, *([] if "/" in name else [one for one in folder.glob("*/**") if one.is_dir()])]
    return any(any(start.glob(name)) for start in starts)


def resolves(name: str) -> bool:
    """Whether `package.module` or `package.module.name` is there."""
    parts = name.split(".")
    for length in range(len(parts), 1, -1):
        path = ROOT.joinpath(*parts[:length])
        if path.with_suffix(".py").exists():
            rest = parts[length : length + 1]
            source = path.with_suffix(".py").read_text(encoding="utf-8")
            return (
                not rest or re.search(rf"^(?:class |def |async def )?{rest[0]}\b", source, re.M) is not None
            )
    return len(parts) > 1 and ROOT.joinpath(*parts).is_dir()


@each("document", DOCUMENTS)
def test_every_file_and_module_named_in_a_document_exists(document: Path) -> None:
    text = prose((ROOT / document).read_text(encoding="utf-8"))
    names = {*quoted(text), *listed(text)}
    files = {name for name in names if FILE.fullmatch(name) and not name.startswith(INSTALLED)}
    files |= set(filter(FOLDER.fullmatch, listed(text)))
    modules = {name for name in names if MODULE.fullmatch(name)}
    missing = {name for name in files if not is_there(name, (ROOT / document).parent)}
    missing |= {name for name in modules if not resolves(name)}
    assert sorted(missing) == []


@pytest.mark.parametrize("package", ["kernels", "wire"])
def test_every_module_of_a_package_stands_in_its_document(package: str) -> None:
    text = (ROOT / package / "README.md").read_text(encoding="utf-8")
    patterns = [name for name in (*quoted(text), *listed(text)) if name.endswith(".py") and "/" not in name]
    modules = [path.name for path in (ROOT / package).glob("*.py") if path.name != "__init__.py"]
    found = {path.name for pattern in patterns for path in (ROOT / package).glob(pattern)}
    assert sorted(set(modules) - found) == []


def test_records_name_commits_that_a_clone_has_or_the_page_says_which_it_lacks() -> None:
    git = ["git", "-C", str(ROOT)]
    shallow = subprocess.run(
        [*git, "rev-parse", "--is-shallow-repository"], capture_output=True, text=True, check=False
    )
    if shallow.stdout.strip() != "false":
        pytest.skip("there is no whole history here")
    history = subprocess.run([*git, "log", "--format=%H"], capture_output=True, text=True, check=True)
    present = history.stdout.split()
    results = ROOT / "scripts" / "results"
    page = (results / "README.md").read_text(encoding="utf-8")
    missing = {
        f"{path.name}: {commit}"
        for path in results.glob("*.json")
        for commit in set(commits_of(json.loads(path.read_bytes())))
        if not any(known.startswith(commit) for known in present) and commit[:7] not in page
    }
    assert not missing
