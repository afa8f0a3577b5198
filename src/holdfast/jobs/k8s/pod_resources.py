"""CPUs, memory and GPUs of a pod, and the nodes that have them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

import yaml

from holdfast.jobs.k8s.refusal import invalid, unsupported
from holdfast.jobs.task.amounts import memory_mib, parse_cpus
from holdfast.jobs.task.model import Task

GPU = "nvidia.com/gpu"
"""Name of NVIDIA's GPUs as a resource."""
_OTHER_VENDORS = re.compile(r"tpu|mi\d|gaudi|trainium|inferentia", re.I)
_MAX_GPUS = 1024
_LABEL = re.compile(r"[A-Za-z0-9](?:[\w.-]{0,61}[A-Za-z0-9])?", re.A)


def gpu_choice(task: Task) -> tuple[tuple[str, ...], int]:
    """Return the models of GPU that a pod may have, and their number; ((), 0) for none.

    Kubernetes cannot choose between numbers, so this includes the choices with the number of the first one.
    """
    choices = task.accelerators.choices
    if not choices:
        return (), 0
    key = "resources.accelerators"
    name, count = choices[0]
    if _OTHER_VENDORS.match(name):
        raise unsupported(
            task, key, f"expected a model of NVIDIA GPU, found {name!r}. Only those are supported."
        )
    if count != int(count) or not 1 <= count <= _MAX_GPUS:
        what = (
            f"expected a whole number of GPUs from 1 to {_MAX_GPUS}, found {count:g}: Kubernetes shares none."
        )
        raise invalid(task, key, what)
    models = tuple(model for model, number in choices if number == count and not _OTHER_VENDORS.match(model))
    too_long = [model for model in models if not _LABEL.fullmatch(model)]
    if too_long:
        raise invalid(task, key, f"expected a model that can be the value of a label, found {too_long[0]!r}.")
    return models, int(count)


def requirements(task: Task) -> dict[str, Any]:
    """Return the `resources` of the container.

    CPUs and memory are requested and not limited: a limit would throttle or kill a training on an idle node.
    """
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
