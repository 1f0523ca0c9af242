"""Grafana's dashboards ask for metrics and labels that exist, and the files are what the code makes."""

import json
import re
from pathlib import Path

import pytest

from pagedray.cluster.metrics.catalog import FAMILIES
from pagedray.cluster.metrics.dashboards import DASHBOARDS, as_file, dashboard, quantile, rate

FOLDER = Path(__file__).parents[2] / "k8s" / "dashboards"
MAKE = "python -m pagedray.cluster.metrics.dashboards k8s/dashboards"
SERIES = {
    family.exposed + suffix: family
    for family in FAMILIES.values()
    for suffix in (("_bucket", "_sum", "_count") if family.kind == "histogram" else ("",))
}


def expressions(name):
    return [target["expr"] for panel in dashboard(name)["panels"] for target in panel["targets"]]


@pytest.mark.parametrize("name", DASHBOARDS)
def test_the_file_is_what_the_code_makes(name):
    assert (FOLDER / f"{name}.json").read_text() == as_file(name), MAKE


def test_there_is_no_other_file():
    assert {p.stem for p in FOLDER.glob("*.json")} == set(DASHBOARDS), MAKE


@pytest.mark.parametrize("name", DASHBOARDS)
def test_every_series_and_label_exists(name):
    """Read from the finished PromQL, not from what made it."""
    for expression in expressions(name):
        asked = re.findall(r"(pagedray_\w+)\{([^}]*)\}", expression)
        assert asked and len(asked) == expression.count("pagedray_"), expression
        for series, matchers in asked:
            family = SERIES[series]
            labels = re.findall(r"(\w+)=~?\"", matchers)
            assert set(labels) <= set(family.all_labels), expression
            grouped = {label for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(", ")}
            assert grouped - {"le"} <= set(family.all_labels), expression
            assert ("le" in grouped) == series.endswith("_bucket"), expression
            assert ("rate(" in expression) == (family.kind != "gauge"), (
                f"{expression}: counters by rate, gauges as they are"
            )


@pytest.mark.parametrize("name", DASHBOARDS)
def test_a_dashboard_can_be_read(name):
    model = json.loads(as_file(name))
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in model["panels"]]
    assert len(set(places)) == len(places) and len({p["id"] for p in model["panels"]}) == len(places)
    legends = {target["legendFormat"] for p in model["panels"] for target in p["targets"]}
    for legend in legends:
        for label in re.findall(r"\{\{(\w+)\}\}", legend):
            assert any(label in family.all_labels for family in FAMILIES.values())


def test_what_does_not_exist_is_refused():
    with pytest.raises(KeyError, match="no label"):
        rate("engine_steps", "tenant")
    with pytest.raises(KeyError):
        quantile(0.5, "no_such_metric")
