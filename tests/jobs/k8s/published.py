"""Published schemas of Kubernetes, JobSet and Kubeflow, closed so that unknown fields are found.

The schemas of Kubernetes come from the package kubernetes-validate. Those of JobSet and Kubeflow are
downloaded by `make crds`, and their tests are skipped without them.
"""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("kubernetes_validate")

CRDS = Path(__file__).parents[3] / ".crds"
KUBERNETES = ("1.31.0", "1.37.0")
JOBSET = ("0.9.1", "0.12.0")
TRAINING_OPERATOR = ("1.8.1", "1.9.0")
_OPEN = ("additionalProperties", "x-kubernetes-preserve-unknown-fields")


def problems_of_core(document: Any, kind: str, version: str) -> list[str]:
    """Return the problems of an object of Kubernetes itself, such as io.k8s.api.batch.v1.Job."""
    return [str(error.message) for error in _core(kind, version).iter_errors(document)]


def problems_of_custom(document: Any, file: str) -> list[str]:
    """Return the problems of an object whose schema is in a file of `.crds`."""
    found = _custom(file)
    if found is None:
        pytest.skip(f"`make crds` downloads {file}")
    return [str(error.message) for error in found.iter_errors(document)]


@cache
def _definitions(version: str) -> Any:
    files = importlib.resources.files("kubernetes_validate")
    path = files / "kubernetes-json-schema" / f"v{version}-local-strict" / "_definitions.json"
    return json.loads(path.read_text())["$defs"]


@cache
def _core(kind: str, version: str) -> Any:
    return _validator({"$ref": f"#/$defs/{kind}", "$defs": _definitions(version)})


@cache
def _custom(file: str) -> Any:
    path = CRDS / file
    if not path.exists():
        return None
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the other one takes seconds for such files
    (version,) = yaml.load(path.read_text(), loader)["spec"]["versions"]
    return _validator(_closed(version["schema"]["openAPIV3Schema"]))


def _closed(schema: Any) -> Any:
    """Return a schema that refuses fields that the API server would silently remove."""
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _closed(value) for key, value in schema.items()}
    is_object = schema.get("type") == "object" and isinstance(schema.get("properties"), dict)
    if is_object and not any(key in schema for key in _OPEN):
        found["additionalProperties"] = False
    return found


def _validator(schema: Any) -> Any:
    extended = jsonschema.validators.extend(
        jsonschema.Draft202012Validator, {"x-kubernetes-list-map-keys": _repeated_keys}
    )
    checker = jsonschema.FormatChecker(formats=())
    checker.checks("int32")(lambda value: not isinstance(value, int) or -(2**31) <= value < 2**31)
    checker.checks("int64")(lambda value: not isinstance(value, int) or -(2**63) <= value < 2**63)
    return extended(schema, format_checker=checker)


def _repeated_keys(validator: Any, keys: Any, items: Any, schema: Any) -> Iterator[Any]:
    """Yield an error for items with the same keys, which server-side apply rejects."""
    found = [tuple(str(item.get(key)) for key in keys) for item in items]
    if len(set(found)) < len(found):
        yield jsonschema.ValidationError(f"repeated {keys}: {found}")
