"""kustomization.yaml and Grafana's provisioning: no program here reads them, so their keys stand here."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.deploy import DEPLOY, GRAFANA, KUBERNETES, compose

Rule = Any
"""A type, a set of values, a list of the rule of each item, or a mapping of keys to rules; `!` is a must."""
STRINGS = [str]
ANYTHING = [dict]
"""Lists whose items deploy/ has none of."""

CONFIG_MAP = {
    "name!": str,
    "namespace": str,
    "behavior": {"create", "replace", "merge"},
    "files": STRINGS,
    "literals": STRINGS,
    "env": str,
    "envs": STRINGS,
    "options": {"labels": dict, "annotations": dict, "disableNameSuffixHash": bool, "immutable": bool},
}
KUSTOMIZATION = {
    "apiVersion!": {"kustomize.config.k8s.io/v1beta1"},
    "kind!": {"Kustomization"},
    "metadata": dict,
    "openapi": dict,
    **dict.fromkeys(("namespace", "namePrefix", "nameSuffix"), str),
    **dict.fromkeys(("commonLabels", "commonAnnotations", "sortOptions", "helmGlobals"), dict),
    "generatorOptions": CONFIG_MAP["options"],
    **dict.fromkeys(("labels", "patches", "images", "replacements", "replicas", "helmCharts"), ANYTHING),
    **dict.fromkeys(("components", "crds", "configurations", "generators", "transformers"), STRINGS),
    **dict.fromkeys(("validators", "buildMetadata"), STRINGS),
    "resources!": STRINGS,
    "configMapGenerator": [CONFIG_MAP],
    "secretGenerator": [{**CONFIG_MAP, "type": str}],
}
"""Of kustomize's Kustomization; it refuses any other key. What it calls deprecated is left out."""

PROVIDERS = {
    "apiVersion!": {1},
    "providers!": [
        {
            "name!": str,
            "orgId": int,
            "type!": {"file"},
            "folder": str,
            "folderUid": str,
            "disableDeletion": bool,
            "editable": bool,
            "allowUiUpdates": bool,
            "updateIntervalSeconds": int,
            "options!": {"path!": str, "foldersFromFilesStructure": bool},
        }
    ],
}
"""Of Grafana's dashboard providers; it passes over what it does not know."""

DATASOURCES = {
    "apiVersion!": {1},
    "prune": bool,
    "deleteDatasources": [{"name!": str, "orgId": int}],
    "datasources!": [
        {
            "name!": str,
            "uid!": str,
            "type!": {"prometheus"},
            "access!": {"proxy", "direct"},
            "url!": str,
            **dict.fromkeys(("orgId", "version"), int),
            **dict.fromkeys(("user", "database", "basicAuthUser"), str),
            **dict.fromkeys(("basicAuth", "withCredentials", "isDefault", "editable"), bool),
            "correlations": ANYTHING,
            "secureJsonData": dict,
            # Of a Prometheus data source.
            "jsonData": {
                "httpMethod": {"GET", "POST"},
                "timeInterval": str,
                "queryTimeout": str,
                "defaultEditor": {"builder", "code"},
                "prometheusType": {"Prometheus", "Cortex", "Mimir", "Thanos"},
                "prometheusVersion": str,
                "cacheLevel": {"Low", "Medium", "High", "None"},
                "customQueryParameters": str,
                "exemplarTraceIdDestinations": ANYTHING,
                **dict.fromkeys(("manageAlerts", "disableRecordingRules", "disableMetricsLookup"), bool),
                **dict.fromkeys(("incrementalQuerying", "tlsSkipVerify", "tlsAuth"), bool),
            },
        }
    ],
}
"""Of Grafana's data sources; it passes over what it does not know."""

PROVIDER = GRAFANA / "provisioning/dashboards/thinwire.yaml"
DATASOURCE = GRAFANA / "provisioning/datasources/prometheus.yaml"
FILES: dict[Path, Rule] = {
    KUBERNETES / "kustomization.yaml": KUSTOMIZATION,
    PROVIDER: PROVIDERS,
    DATASOURCE: DATASOURCES,
}


def faults(value: Any, rule: Rule, where: str = "") -> Iterator[str]:
    """Violations of a rule by a value."""
    if isinstance(rule, Mapping):
        if not isinstance(value, dict):
            yield f"{where}: no mapping"
            return
        rules = {key.rstrip("!"): inner for key, inner in rule.items()}
        yield from (f"{where}.{key}: missing" for key in rules if f"{key}!" in rule and key not in value)
        for key, inner in value.items():
            if key in rules:
                yield from faults(inner, rules[key], f"{where}.{key}")
            else:
                yield f"{where}.{key}: no such key"
    elif isinstance(rule, list):
        if not isinstance(value, list):
            yield f"{where}: no list"
            return
        for at, item in enumerate(value):
            yield from faults(item, rule[0], f"{where}[{at}]")
    elif isinstance(rule, set):
        # True is 1 otherwise.
        if not any(type(value) is type(one) and value == one for one in rule):
            yield f"{where}: {value!r} is none of {rule}"
    elif type(value) is not rule:
        yield f"{where}: {value!r} is no {rule.__name__}"


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def named(path: Path) -> str:
    return str(path.relative_to(DEPLOY))


@pytest.mark.parametrize("path", FILES, ids=named)
def test_every_key_and_value_exists(path: Path) -> None:
    assert list(faults(read(path), FILES[path])) == []


@pytest.mark.parametrize(
    ("path", "right", "wrong", "complaint"),
    [
        (KUBERNETES / "kustomization.yaml", "namespace:", "namespaze:", ".namespaze: no such key"),
        (KUBERNETES / "kustomization.yaml", "resources:", "resource:", ".resources: missing"),
        (PROVIDER, "type: file", "type: fiel", ".providers[0].type: 'fiel' is none of"),
        (PROVIDER, "path:", "pathe:", ".providers[0].options.path: missing"),
        (PROVIDER, "updateIntervalSeconds: 60", "updateIntervalSeconds: 60s", "'60s' is no int"),
        (DATASOURCE, "access: proxy", "access: proxi", ".datasources[0].access: 'proxi' is none of"),
        (DATASOURCE, "timeInterval:", "timeIntervall:", ".jsonData.timeIntervall: no such key"),
        (DATASOURCE, "isDefault: true", "isDefault: yess", "'yess' is no bool"),
    ],
)
def test_a_misspelling_in_a_file_is_noticed(path: Path, right: str, wrong: str, complaint: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count(right) == 1
    found = list(faults(yaml.safe_load(text.replace(right, wrong)), FILES[path]))
    assert any(complaint in fault for fault in found), found


def test_kustomization_puts_everything_into_the_namespace_that_it_makes() -> None:
    namespace = read(KUBERNETES / "namespace.yaml")["metadata"]["name"]
    assert read(KUBERNETES / "kustomization.yaml")["namespace"] == namespace


def test_grafanas_provisioning_names_existing_files() -> None:
    services = compose()["services"]
    mounts = dict(mount.split(":")[1::-1] for mount in services["grafana"]["volumes"])
    # Grafana finds each kind of file in the folder of that name.
    assert mounts["/etc/grafana/provisioning"] == "./grafana/provisioning"
    assert {path.name for path in (GRAFANA / "provisioning").iterdir()} == {"dashboards", "datasources"}
    (provider,) = read(PROVIDER)["providers"]
    assert list((DEPLOY / mounts[provider["options"]["path"]]).glob("*.json"))
    (source,) = read(DATASOURCE)["datasources"]
    prometheus = read(DEPLOY / "prometheus" / "prometheus.yml")["global"]
    assert source["jsonData"]["timeInterval"] == prometheus["scrape_interval"]
    _, host, port = source["url"].replace("//", "").split(":")
    assert services[host]["image"].startswith("prom/") and port == "9090"
