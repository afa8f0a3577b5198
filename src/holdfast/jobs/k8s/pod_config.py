"""The user's own settings of pods, `config.kubernetes.pod_config`, merged into a pod template; pure.

Source: SkyPilot, which has this key. Maps are merged, lists are joined, and the first container is the
training's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.jobs.k8s.refusal import POD_CONFIG, invalid
from holdfast.jobs.task.model import Task
from holdfast.jobs.unsupported_keys import value_at

_GRACE_S = 120
"""Default time between SIGTERM and the end of a pod. A cloud may reclaim a machine sooner."""
_MAX_GRACE_S = 2**31 - 1
_IDENTITY = {"volumeMounts": "mountPath", "tolerations": "", "imagePullSecrets": "name"}
"""Member that identifies an item of a list, if it is not `name`. Empty: items are never merged."""
_OURS = ("restartPolicy", "hostname", "subdomain")
_OURS_IN_CONTAINER = ("command", "args", "name")


def pod_config(task: Task) -> Mapping[str, Any]:
    """Return the user's settings. Their form is checked, and most of their content is not."""
    asked = value_at(task.document, POD_CONFIG)
    if asked is None:
        return {}
    if not _is_plain(asked) or not isinstance(asked, Mapping) or not set(asked) <= {"metadata", "spec"}:
        raise invalid(task, POD_CONFIG, "expected a map with metadata and spec of a pod.")
    for key in ("metadata", "spec"):
        if not isinstance(asked.get(key, {}), Mapping):
            raise invalid(task, POD_CONFIG, f"expected a map as {key}.")
    _check_spec(task, asked.get("spec", {}))
    return asked


def grace_s(task: Task) -> int:
    """Return the time between SIGTERM and the end of a pod."""
    found = pod_config(task).get("spec", {}).get("terminationGracePeriodSeconds", _GRACE_S)
    if not isinstance(found, int) or isinstance(found, bool) or not 1 <= found <= _MAX_GRACE_S:
        what = f"expected a positive number of seconds as terminationGracePeriodSeconds, found {found!r}."
        raise invalid(task, POD_CONFIG, what)
    return found


def merge_pod_config(task: Task, template: Mapping[str, Any]) -> dict[str, Any]:
    """Return a pod template with the user's settings."""
    return _merge(task, template, pod_config(task), "")


def _check_spec(task: Task, spec: Mapping[str, Any]) -> None:
    containers = spec.get("containers", [{}])
    if not isinstance(containers, list) or not all(isinstance(one, Mapping) for one in containers):
        raise invalid(task, POD_CONFIG, "expected a list of maps as spec.containers.")
    if len(containers) > 1:
        what = (
            "expected one container in spec.containers, whose settings are those of the training: a pod with"
        )
        raise invalid(
            task, POD_CONFIG, f"{what} a second one would not end. Use spec.initContainers for others."
        )
    found = [f"spec.{key}" for key in _OURS if key in spec]
    found += [f"spec.containers[0].{key}" for one in containers for key in _OURS_IN_CONTAINER if key in one]
    found = [key for key in found if key != "spec.containers[0].name"]
    if found:
        raise invalid(task, POD_CONFIG, f"Holdfast sets {found[0]} itself.")


def _merge(task: Task, ours: Any, theirs: Any, where: str) -> Any:
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        merged = dict(ours)
        for key, value in theirs.items():
            path = f"{where}.{key}" if where else key
            merged[key] = _merge(task, ours[key], value, path) if key in ours else value
        return merged
    if where == "spec.containers":
        (training,) = ours
        settings = {key: value for one in theirs for key, value in one.items() if key != "name"}
        return [_merge(task, training, settings, f"{where}[0]")]
    if isinstance(ours, list) and isinstance(theirs, list):
        return _join(task, ours, theirs, where)
    if isinstance(ours, (Mapping, list)) or isinstance(theirs, (Mapping, list)):
        raise invalid(task, POD_CONFIG, f"expected a {_kind(ours)} as {where}, found a {_kind(theirs)}.")
    return theirs


def _join(task: Task, ours: list[Any], theirs: list[Any], where: str) -> list[Any]:
    """Return a list with all items of two. Of two items of the same name the user's replaces Holdfast's."""
    identity = _IDENTITY.get(where.rpartition(".")[2], "name")
    if not all(isinstance(one, Mapping) for one in [*ours, *theirs]):
        return [*ours, *theirs]
    names = {one.get(identity) for one in theirs if identity in one}
    return [one for one in ours if one.get(identity) not in names or identity not in one] + theirs


def _kind(value: Any) -> str:
    return "map" if isinstance(value, Mapping) else "list" if isinstance(value, list) else "single value"


def _is_plain(value: Any) -> bool:
    """Return True if a value is one of JSON."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(one) for key, one in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    is_number = isinstance(value, (int, float)) and value == value and abs(value) != float("inf")
    return value is None or is_number or isinstance(value, str)
