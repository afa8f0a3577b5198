"""Resources of a pod, and the user's own settings, `config.kubernetes.pod_config`, merged into its template.

Source: SkyPilot, which has this key. Maps are merged, lists are joined, and the first container is the
training's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

import yaml

from holdfast.jobs.k8s.refusal import POD_CONFIG, invalid, unsupported
from holdfast.jobs.task.amounts import memory_mib, parse_cpus
from holdfast.jobs.task.model import Task, value_at

_GRACE_S = 120  # default time between SIGTERM and the end of a pod. A cloud may reclaim a machine sooner.
_MAX_GRACE_S = 2**31 - 1
_IDENTITY = {"volumeMounts": "mountPath", "tolerations": "", "imagePullSecrets": "name"}
"""Member that identifies an item of a list, if it is not `name`. Empty: items are never merged."""
_KINDS = {dict: "map", list: "list"}
_OURS = ("restartPolicy", "hostname", "subdomain")


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


def _check_spec(task: Task, spec: Mapping[str, Any]) -> None:
    containers = spec.get("containers", [{}])
    if not isinstance(containers, list) or not all(isinstance(one, Mapping) for one in containers):
        raise invalid(task, POD_CONFIG, "expected a list of maps as spec.containers.")
    if len(containers) > 1:
        what = (
            "expected one container in spec.containers, whose settings are those of the training: a pod with "
            "a second one would not end. Use spec.initContainers for others."
        )
        raise invalid(task, POD_CONFIG, what)
    found = [f"spec.{key}" for key in _OURS if key in spec]
    found += [f"spec.containers[0].{key}" for one in containers for key in ("command", "args") if key in one]
    if found:
        raise invalid(task, POD_CONFIG, f"Holdfast sets {found[0]} itself.")


def merge_pod_config(task: Task, ours: Any, theirs: Any, where: str = "") -> Any:
    """Return Holdfast's part of a pod template, merged with the user's part at the same place."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        merged = dict(ours)
        for key, value in theirs.items():
            path = f"{where}.{key}" if where else key
            merged[key] = merge_pod_config(task, ours[key], value, path) if key in ours else value
        return merged
    if where == "spec.containers":
        (training,) = ours
        settings = {key: value for one in theirs for key, value in one.items() if key != "name"}
        return [merge_pod_config(task, training, settings, f"{where}[0]")]
    if isinstance(ours, list) and isinstance(theirs, list):
        identity = _IDENTITY.get(where.rpartition(".")[2], "name")
        if not all(isinstance(one, Mapping) for one in [*ours, *theirs]):
            return [*ours, *theirs]
        # Of two items of the same name, the user's replaces Holdfast's.
        names = {one.get(identity) for one in theirs if identity in one}
        return [one for one in ours if one.get(identity) not in names or identity not in one] + theirs
    expected, found = (_KINDS.get(type(one), "single value") for one in (ours, theirs))
    if "map" in (expected, found) or "list" in (expected, found):
        raise invalid(task, POD_CONFIG, f"expected a {expected} as {where}, found a {found}.")
    return theirs


def _is_plain(value: Any) -> bool:
    """Return True if a value is one of JSON."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(one) for key, one in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    is_number = isinstance(value, (int, float)) and value == value and abs(value) != float("inf")
    return value is None or is_number or isinstance(value, str)


GPU = "nvidia.com/gpu"  # name of NVIDIA's GPUs as a resource
_OTHER_VENDORS = re.compile(r"tpu|mi\d|gaudi|trainium|inferentia", re.I)
_MAX_GPUS = 1024
_LABEL = re.compile(r"[A-Za-z0-9](?:[\w.-]{0,61}[A-Za-z0-9])?", re.A)


def gpu_choice(task: Task) -> tuple[tuple[str, ...], int]:
    """Return the models of GPU that a pod may have, and their number, which is that of the first choice."""
    choices = task.accelerators.choices
    if not choices:
        return (), 0
    key = "resources.accelerators"
    name, count = choices[0]
    if _OTHER_VENDORS.match(name):
        what = f"expected a model of NVIDIA GPU, found {name!r}. Only those are supported."
        raise unsupported(task, key, what)
    if count != int(count) or not 1 <= count <= _MAX_GPUS:
        what = f"expected a whole number of GPUs from 1 to {_MAX_GPUS}, found {count:g}: "
        raise invalid(task, key, f"{what}Kubernetes shares none.")
    models = tuple(model for model, number in choices if number == count and not _OTHER_VENDORS.match(model))
    too_long = [model for model in models if not _LABEL.fullmatch(model)]
    if too_long:
        raise invalid(task, key, f"expected a model that can be the value of a label, found {too_long[0]!r}.")
    return models, int(count)


def requirements(task: Task) -> dict[str, Any]:
    """Return the `resources` of the container. Limits of CPUs or memory could throttle or kill a training."""
    asked = task.document.get("resources") or {}
    requests: dict[str, str] = {}
    cpus = parse_cpus(asked.get("cpus"))
    if cpus is not None:
        thousandths = max(1, round(cpus * 1000))
        requests["cpu"] = f"{thousandths}m" if thousandths % 1000 else str(thousandths // 1000)
    memory = memory_mib(asked.get("memory"))
    if memory:
        requests["memory"] = f"{memory}Mi"
    _, num_gpus = gpu_choice(task)
    found: dict[str, Any] = {"requests": requests} if requests else {}
    return {**found, "limits": {GPU: str(num_gpus)}} if num_gpus else found


def affinity(task: Task) -> dict[str, Any]:
    """Return the affinity for nodes with the GPUs of a task, by any label; empty if it needs none."""
    models, _ = gpu_choice(task)
    values = {"skypilot.co/accelerator": [model.lower() for model in models]}
    for label, names in _labels().items():
        values[label] = [name for model in models for name in names.get(model.upper(), ())]
    # Terms are alternatives: a cluster has one of these labels, and usually not the others.
    terms = [
        {"matchExpressions": [{"key": label, "operator": "In", "values": found}]}
        for label, found in values.items()
        if found
    ]
    wanted = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    return {"nodeAffinity": wanted} if terms else {}


@cache
def _labels() -> Mapping[str, Mapping[str, list[str]]]:
    return yaml.safe_load((resources.files("holdfast.jobs.k8s") / "gpu_labels.yaml").read_text())
