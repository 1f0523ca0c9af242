"""Kubernetes objects against their schemas, strictly: a field that the schema does not have is refused.

`kubectl apply` drops what a CRD does not know, in silence; a manifest with a misspelled field would seem to work.
"""

import functools
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

KUBERNETES = "1.31"
CRDS = Path(__file__).parents[3] / "shared" / "data" / "crds"


def check(document: dict[str, Any]) -> None:
    """Raise `jsonschema.ValidationError`, or kubernetes-validate's, for what the API server would not take whole."""
    if document["apiVersion"].startswith("ray.io/"):
        jsonschema.Draft7Validator(_of_crd(document["kind"])).validate(document)
        for template in pod_templates(document):
            kubernetes_validate.validate(
                {"apiVersion": "v1", "kind": "Pod", **_named(template)}, KUBERNETES, strict=True
            )
    else:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)


def pod_templates(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The pods that an object makes."""
    spec = document.get("spec", {})
    cluster = spec.get("rayClusterConfig", spec)
    groups = [cluster.get("headGroupSpec"), *cluster.get("workerGroupSpecs", ())]
    templates = [group["template"] for group in groups if group]
    return templates or ([spec["template"]] if "template" in spec else [])


def _named(template: dict[str, Any]) -> dict[str, Any]:
    return {**template, "metadata": {"name": "x", **template.get("metadata", {})}}


@functools.cache
def _of_crd(kind: str) -> dict[str, Any]:
    crd = yaml.safe_load((CRDS / f"ray.io_{kind.lower()}s.yaml").read_text())
    (version,) = (v for v in crd["spec"]["versions"] if v["name"] == "v1")
    return _closed(version["schema"]["openAPIV3Schema"])


def _closed(schema: Any) -> Any:
    """A CRD's schema as JSON Schema, with every object that lists its fields closed to others."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items() if key != "properties"}
    if "properties" in schema:
        closed["properties"] = {name: _closed(field) for name, field in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields") and "additionalProperties" not in schema:
            closed["additionalProperties"] = False
    if schema.get("x-kubernetes-int-or-string"):
        closed.pop("type", None)
        closed["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    return closed
