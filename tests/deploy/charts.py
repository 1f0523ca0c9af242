"""Renders the Helm chart by Helm itself: the `helm` command, else PyPI's `helm-python-sdk`, which has its library.

python tests/deploy/charts.py    # writes k8s/*.yaml anew, from the chart and k8s/values/*.yaml
"""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "k8s" / "helm" / "pagedray"
VALUES = sorted((ROOT / "k8s" / "values").glob("*.yaml"))
RELEASE = "pagedray"


class NoHelm(Exception):
    """Neither way to Helm is there."""


class ChartError(Exception):
    """Helm refuses the values or the chart; says why."""


def render(values: dict[str, Any], release: str = RELEASE) -> str:
    """What `helm template` prints: documents that each begin with `---` and `# Source: …`."""
    if helm := shutil.which("helm"):
        command = [helm, "template", release, str(CHART), "--values", "-"]
        run = subprocess.run(command, input=json.dumps(values), capture_output=True, text=True, timeout=60)
        if run.returncode:
            raise ChartError(run.stderr)
        return run.stdout
    try:
        import helm_python
    except ImportError:
        raise NoHelm("no helm: neither the command nor PyPI's helm-python-sdk") from None
    try:
        with helm_python.Chart.load(CHART) as chart:
            chart.validate_schema(chart.merge_values(values))
            files = chart.render(values, name=release, namespace="default")
    except helm_python.HelmError as error:
        raise ChartError(str(error)) from None
    pieces = []
    for name in sorted(files):
        for document in files[name].split("\n---\n") if name.endswith(".yaml") else ():
            if document := document.strip().removeprefix("---\n"):
                pieces.append(f"---\n# Source: {name}\n{document}\n")
    return "".join(pieces)


def documents(text: str) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(text) if document]


def manifest(values_file: Path) -> tuple[Path, str]:
    """The manifest that belongs to a file of values: where it lies, and its text."""
    values = values_file.read_text()
    title = values[: values.index("\naccelerator:")]
    made = (
        f"{title}\n# Made by `python tests/deploy/charts.py` of k8s/helm/pagedray with k8s/values/{values_file.name}.\n"
    )
    return ROOT / "k8s" / f"rayservice-{values_file.name}", f"{title}\n{made}" + render(yaml.safe_load(values))


if __name__ == "__main__":
    for path in VALUES:
        target, text = manifest(path)
        target.write_text(text)
        print(target.relative_to(ROOT))
