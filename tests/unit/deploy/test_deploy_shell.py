"""The README's commands that set up a volunteer's service, run below a folder that stands for the root."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.deploy import DEPLOY, ROOT, UNITS

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def set_up() -> list[str]:
    """The commands of its blocks that make files and enable the service; an image's own are a linter's."""
    text = (DEPLOY / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    blocks = [line.partition(" #")[0] for line in text.splitlines() if line.startswith("    ")]
    commands = [re.sub(r"\s+", " ", line.strip()) for line in blocks]
    return [command for command in commands if command.startswith(("install ", "cp ", "systemctl enable"))]


def carried_out(command: str, root: Path) -> None:
    """Run a command as it stands, but for the root. Fails as it does."""
    quoted = shlex.quote(str(root))
    if command.startswith("systemctl"):
        # What is enabled below another root would be started on this machine.
        line = command.replace("systemctl", f"systemctl --root={quoted}", 1).replace(" --now ", " ")
    else:
        line = re.sub(r"(?<= )/(?!dev/)", f"{quoted}/", command)
    done = subprocess.run(
        ["/bin/sh", "-ec", line],
        cwd=ROOT,
        env={"PATH": PATH, "HOME": str(root)},
        input="token-of-a-run\n",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"


def test_a_volunteers_machine_is_set_up_by_commands_that_work(tmp_path: Path) -> None:
    (tmp_path / "etc/systemd/system").mkdir(parents=True)
    *commands, enable = set_up()
    assert [command.split()[0] for command in commands] == ["install", "install", "cp"]
    for command in commands:
        carried_out(command, tmp_path)
    folder = tmp_path / "etc/thinwire"
    assert folder.stat().st_mode & 0o777 == 0o755
    assert (folder / "token").read_text() == "token-of-a-run\n"
    assert (folder / "token").stat().st_mode & 0o777 == 0o600
    (source,) = (path for path in UNITS if path.name == "thinwire-node.service")
    assert (tmp_path / "etc/systemd/system" / source.name).read_bytes() == source.read_bytes()
    if not shutil.which("systemctl"):
        pytest.skip("needs systemctl (Debian: apt install systemd)")
    carried_out(enable, tmp_path)
    assert (tmp_path / "etc/systemd/system/multi-user.target.wants" / source.name).is_symlink()
