"""The check of the container image, with builders that only write down what they are told."""

import sys
from pathlib import Path

import pytest

from scripts.checks import image

BUILDER = """#!{python}
import sys
open({log!r}, "a").write(" ".join(sys.argv[1:]) + "\\n")
print({said!r})
"""
SAYS_ALL = " ".join(wanted for _, wanted in image.RUNS)


def builder(folder: Path, name: str, said: str) -> tuple[Path, Path]:
    """A program of that name, and the file in which it writes its arguments, a line a call."""
    program, log = folder / name, folder / "log"
    program.write_text(BUILDER.format(python=sys.executable, log=str(log), said=said))
    program.chmod(0o755)
    return program, log


@pytest.mark.parametrize("name", image.BUILDERS)
def test_the_image_is_built_and_run_as_the_page_says(name: str, tmp_path: Path) -> None:
    page = (image.ROOT / "deploy" / "README.md").read_text(encoding="utf-8")
    program, log = builder(tmp_path, name, SAYS_ALL)
    image.check(str(program))
    build, *runs = log.read_text().splitlines()
    assert f"docker {build}".replace(image.IMAGE, "thinwire:cpu") in page
    if name == "buildah":
        assert runs.pop(0) == f"from {image.IMAGE}" and runs.pop().startswith("rm ")
    ends = [line.removeprefix(f"run --rm {image.IMAGE} ").rpartition("-- thinwire ")[2] for line in runs]
    assert ends == [" ".join(arguments) for arguments, _ in image.RUNS]


def test_an_image_that_does_not_train_is_an_error(tmp_path: Path) -> None:
    program, log = builder(tmp_path, "docker", SAYS_ALL.replace("all steps are done", "step 1 failed"))
    with pytest.raises(SystemExit, match=r"demo .*never says 'all steps are done'"):
        image.check(str(program))
    assert len(log.read_text().splitlines()) == 1 + len(image.RUNS)
