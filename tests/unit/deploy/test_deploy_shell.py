"""The commands of deploy/ that are not thinwire's, run below a folder that stands for the machine's root.

Those of the Dockerfile, but for its `pip install` (tests/integration/test_deploy_commands.py), and those of
the README that set up a service. Packages are looked for and not installed.
"""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.deploy import DEPLOY, ROOT, UNITS, instructions

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
LISTS = any(Path("/var/lib/apt/lists").glob("*Packages*"))
NEEDS = {
    "apt-get": (shutil.which("apt-get") is not None and LISTS, "Debian's package lists (apt-get update)"),
    "useradd": (shutil.which("useradd", path=PATH) is not None and os.getuid() == 0, "useradd, and root"),
    "systemctl": (shutil.which("systemctl") is not None, "systemctl (Debian: apt install systemd)"),
}
ELSEWHERE = {"pip", "thinwire"}
"""Programs whose commands other tests run."""
LEFT_OUT = {
    "systemctl daemon-reload",
    "journalctl -fu thinwire-node",
    "docker build -f deploy/container/Dockerfile --target cpu -t thinwire:cpu .",
    "docker build -f deploy/container/Dockerfile --target cuda -t thinwire:cuda .",
    "docker run --gpus all --network host -v thinwire:/var/lib/thinwire -v ./token:/token:ro"
    " -e HEALTH_URL=http://127.0.0.1:7703/metrics thinwire:cuda join --token-file /token"
    " --metrics 127.0.0.1:7703",
    "ADVERTISE=203.0.113.7:7700 docker compose up -d",
    "docker compose logs coordinator",
    "kubectl apply -k deploy/kubernetes",
    "kubectl -n thinwire exec thinwire-coordinator-0 -- thinwire token create /var/lib/thinwire/run"
    " --uses 100 --ttl 30d",
    "kubectl -n thinwire create secret generic thinwire-join --from-literal=token=TOKEN",
    "kubectl -n thinwire port-forward thinwire-coordinator-0 7700",
}
"""What needs a running systemd, a container engine or a cluster; thinwire's part of it is run elsewhere."""


def of_the_image() -> list[str]:
    """The commands of the Dockerfile's RUNs, one by one."""
    runs = [one["value"] for one in instructions() if one["instruction"] == "RUN"]
    return [re.sub(r"\s+", " ", command.strip()) for run in runs for command in run.split("&&")]


def of_the_readme() -> list[str]:
    """Those in its blocks, thinwire's own and the line of a file left out."""
    text = (DEPLOY / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    blocks = [line.partition(" #")[0] for line in text.splitlines() if line.startswith("    ")]
    commands = [re.sub(r"\s+", " ", line.strip()) for line in blocks]
    return [command for command in commands if not command.startswith(("thinwire ", "NODE_OPTIONS="))]


def set_up() -> list[str]:
    """Those that make a volunteer's machine ready."""
    return [command for command in of_the_readme() if command not in LEFT_OUT]


def carried_out(command: str, root: Path) -> None:
    """Run a command as it stands, but for the root. Fails as it does; skips what cannot be run here."""
    program = command.split()[0]
    there, what = NEEDS.get(program, (True, ""))
    if not there:
        pytest.skip(f"needs {what}")
    quoted = shlex.quote(str(root))
    own = {
        "apt-get": "apt-get --print-uris",
        "useradd": f"useradd --prefix {quoted}",
        "systemctl": f"systemctl --root={quoted}",
    }
    if program in own:
        # What is enabled below another root would be started on this machine.
        line = command.replace(program, own[program], 1).replace(" --now ", " ")
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


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The machine as the commands see it."""
    for folder in ("etc/systemd/system", "var/lib/apt/lists"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("passwd", "group", "shadow", "gshadow"):
        (tmp_path / "etc" / file).touch()
    (tmp_path / "var/lib/apt/lists/Packages").touch()
    return tmp_path


def test_every_command_is_run_here_or_elsewhere_or_cannot_be() -> None:
    assert {command.split()[0] for command in of_the_image()} == {"apt-get", "rm", "useradd", *ELSEWHERE}
    found = of_the_readme()
    assert set(found) >= LEFT_OUT
    programs = [command.split()[0] for command in set_up()]
    assert programs == ["install", "install", "cp", "systemctl"]


@pytest.mark.parametrize(
    "command", [one for one in dict.fromkeys(of_the_image()) if one.split()[0] not in ELSEWHERE]
)
def test_the_image_is_made_by_commands_that_work(command: str, root: Path) -> None:
    carried_out(command, root)
    if command.startswith("rm"):
        assert list((root / "var/lib/apt/lists").iterdir()) == []
    if command.startswith("useradd"):
        (user,) = (root / "etc/passwd").read_text().splitlines()
        name, _, number, group, _, home, _ = user.split(":")
        assert (name, home) == ("thinwire", "/var/lib/thinwire") and (root / home[1:]).is_dir()
        # The user that the image and the pods run as, with a group of its own.
        users = {one["value"] for one in instructions() if one["instruction"] == "USER"}
        assert users == {f"{number}:{number}"}
        assert f"thinwire:x:{group}:" in (root / "etc/group").read_text()


def test_a_volunteers_machine_is_set_up_by_commands_that_work(root: Path) -> None:
    *commands, enable = set_up()
    for command in commands:
        carried_out(command, root)
    folder = root / "etc/thinwire"
    assert folder.stat().st_mode & 0o777 == 0o755
    assert (folder / "token").read_text() == "token-of-a-run\n"
    assert (folder / "token").stat().st_mode & 0o777 == 0o600
    (source,) = (path for path in UNITS if path.name == "thinwire-node.service")
    assert (root / "etc/systemd/system" / source.name).read_bytes() == source.read_bytes()
    carried_out(enable, root)
    assert (root / "etc/systemd/system/multi-user.target.wants" / source.name).is_symlink()


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("apt-get update", "apt-get updat"),
        ("--no-install-recommends tini", "--no-install-recommend tini"),
        ("--no-install-recommends tini", "--no-install-recommends tinny"),
        ("rm -rf", "rm -rq"),
        ("--user-group", "--usr-group"),
        ("--home-dir", "--home-directory"),
        ("install -d -m 0755", "install -d -m 0785"),
        ("install -d -m", "install -d --mood"),
        ("install -m 0600 /dev/stdin", "install -q 0600 /dev/stdin"),
        ("cp deploy/systemd/thinwire-node.service", "cp deploy/systemd/thinwire-nod.service"),
        ("systemctl enable --now", "systemctl enabel --now"),
        ("systemctl enable --now", "systemctl enable --noww"),
    ],
)
def test_a_misspelling_is_noticed(right: str, wrong: str, root: Path) -> None:
    command = next(one for one in (*of_the_image(), *set_up()) if right in one)
    if command in set_up():
        # What the others leave behind is not what is missing.
        for one in set_up():
            carried_out(one, root)
    with pytest.raises(AssertionError):
        carried_out(command.replace(right, wrong), root)
