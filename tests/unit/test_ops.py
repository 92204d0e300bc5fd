"""The dashboard and the alerts use only existing metrics, and all of them are shown."""

import json
import re
import shutil
import subprocess

import pytest
import yaml

from tests.prometheus_server import DASHBOARD, OPS, alerts, panels
from trimaran.machine import HARDWARE_THROTTLE_REASONS, THROTTLE_REASONS
from trimaran.runs import CATALOGUE


def test_queries_use_metrics_of_the_catalogue_and_show_all_of_them() -> None:
    endings = {"counter": ("_total",), "summary": ("_sum", "_count"), "histogram": ("_sum", "_count", "_bucket")}
    metric_of = {
        f"trimaran_{name}{ending}": name
        for name, metric in CATALOGUE.items()
        for ending in endings.get(metric.kind, ("",))
    }
    asked = {query for _, query in panels()} | {rule["expr"] for rule in alerts().values()}
    used = {name for query in asked for name in re.findall(r"\btrimaran_\w+", query)}
    assert used <= metric_of.keys()
    assert {metric_of[name] for name in used} == CATALOGUE.keys()


def test_grafana_has_the_same_alerts() -> None:
    tree = yaml.safe_load((OPS / "grafana" / "provisioning" / "alerting" / "trimaran.yaml").read_text())
    theirs = {rule["title"]: rule for group in tree["groups"] for rule in group["rules"]}
    assert theirs.keys() == alerts().keys()
    for name, rule in alerts().items():
        assert theirs[name]["data"][0]["model"]["expr"] == f"count by (run) ({rule['expr']})"
        assert theirs[name]["for"] == rule["for"]
        assert theirs[name]["labels"] == rule["labels"]


def test_the_gpu_alert_names_every_hardware_throttle_reason_but_not_the_power_limit() -> None:
    (reasons,) = re.findall(r'reason=~"([^"]+)"', alerts()["TrimaranGpuThrottled"]["expr"])
    assert set(reasons.split("|")) == set(HARDWARE_THROTTLE_REASONS)
    assert set(HARDWARE_THROTTLE_REASONS) < set(THROTTLE_REASONS.values()) - {"power_cap"}


def test_the_dashboard_has_a_fixed_uid_and_a_data_source_variable() -> None:
    tree = json.loads(DASHBOARD.read_text())
    assert tree["uid"] == "trimaran-run"
    assert [each["type"] for each in tree["templating"]["list"]] == ["datasource", "query"]
    shown = [panel for panel in tree["panels"] if panel["type"] != "row"]
    assert {panel["datasource"]["uid"] for panel in shown} == {"${DS_PROMETHEUS}"}
    assert len({panel["id"] for panel in tree["panels"]}) == len(tree["panels"])


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs the Debian package prometheus")
def test_promtool_accepts_the_configuration_and_the_rules() -> None:
    done = subprocess.run(["promtool", "check", "config", OPS / "prometheus" / "prometheus.yaml"], capture_output=True)
    assert done.returncode == 0, done.stderr
    assert f"{len(alerts())} rules found" in done.stdout.decode()


def test_the_guide_explains_every_metric_and_every_alert() -> None:
    guide = (OPS.parent / "docs" / "guides" / "observability.md").read_text()
    for name, metric in CATALOGUE.items():
        shown = f"trimaran_{name}_total" if metric.kind == "counter" else f"trimaran_{name}"
        labels = " " + ", ".join(f"`{each}`" for each in metric.labels) if metric.labels else ""
        assert f"| `{shown}` | {metric.kind} |{labels} | {metric.meaning} |" in guide
    for name in alerts():
        assert f"| `{name}` |" in guide
