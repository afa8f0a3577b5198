"""Task-file keys that Kubernetes ignores or interprets differently."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from holdfast.jobs.engine import UnsupportedKey
from holdfast.jobs.k8s.names import object_name
from holdfast.jobs.k8s.pod_resources import gpu_choice
from holdfast.jobs.k8s.refusal import POD_CONFIG, line_of
from holdfast.jobs.task.amounts import memory_mib, parse_cpus
from holdfast.jobs.task.model import Task
from holdfast.jobs.unsupported_keys import CHOICE_KEYS, UNUSED_KEYS, find_unsupported_keys, value_at

_CHOICE = f"the scheduler of the cluster chooses the nodes; to restrict them, use {POD_CONFIG}"
_UNSUPPORTED_KEYS: Mapping[str, str] = {
    **{key: what for key, what in UNUSED_KEYS.items() if key != "volumes"},
    **dict.fromkeys(CHOICE_KEYS, _CHOICE),
    "setup": "runs in every pod and at every start: a container keeps no files",
    "resources.infra": "kubectl chooses the cluster: kubectl --context NAME apply",
    "resources.use_spot": "clusters mark spot nodes differently; add their tolerations and nodeSelector to "
    f"{POD_CONFIG}",
    "resources.job_recovery.strategy": "the scheduler of the cluster chooses the nodes",
    "resources.network_tier": f"the cluster's network as it is; see {POD_CONFIG}",
    "resources.autostop": "no machine is stopped",
    "resources.priority": "not passed on; use priority_class",
}
_UNDERSTOOD = ("pod_config", "kueue")


def unsupported_keys(task: Task) -> list[UnsupportedKey]:
    """Return the keys of a task that Kubernetes ignores or changes, in file order."""
    found = [*find_unsupported_keys(task, _UNSUPPORTED_KEYS), *_name(task), *_amounts(task), *_gpus(task)]
    found += [*_config(task), *_repository(task), *_recovery(task)]
    return sorted(found, key=lambda found_key: found_key.line)


def _key(task: Task, key: str, what: str) -> UnsupportedKey:
    return UnsupportedKey(key, line_of(task, key), what)


def _name(task: Task) -> Iterator[UnsupportedKey]:
    name = object_name(task)
    what = f"SKYPILOT_TASK_ID is NAMESPACE-{name}: a job of the same name continues the same training"
    yield _key(task, "name", what)


def _amounts(task: Task) -> Iterator[UnsupportedKey]:
    for key, parse in (("resources.cpus", parse_cpus), ("resources.memory", memory_mib)):
        value = value_at(task.document, key)
        if value is not None and not parse(value):
            yield _key(task, key, "not passed on: not a fixed amount")


def _gpus(task: Task) -> Iterator[UnsupportedKey]:
    models, _ = gpu_choice(task)
    if not models:
        return
    spec: Any = value_at(task.document, f"{POD_CONFIG}.spec") or {}
    key = "resources.accelerators"
    left_out = [name for name, _ in task.accelerators.choices if name not in models]
    if left_out:
        yield _key(
            task, key, f"without {', '.join(left_out)}: Kubernetes cannot choose between numbers of GPUs"
        )
    if "affinity" in spec or "nodeSelector" in spec:
        yield _key(task, key, f"only the number: the nodes are those of {POD_CONFIG}")
    else:
        what = "on nodes with SkyPilot's, Google's or NVIDIA's label of this model; for other labels give a "
        yield _key(task, key, f"{what}nodeSelector in {POD_CONFIG}")


def _config(task: Task) -> Iterator[UnsupportedKey]:
    config: Any = task.document.get("config")
    for name, value in (config or {}).items():
        keys = [f"config.{name}"]
        if name == "kubernetes" and isinstance(value, Mapping):
            keys = [f"config.kubernetes.{one}" for one in value if one not in _UNDERSTOOD]
        for key in keys:
            yield _key(task, key, "settings of clouds and clusters; kept for other engines")


def _repository(task: Task) -> Iterator[UnsupportedKey]:
    if task.repository is not None:
        what = (
            "cloned at every start, with the git of the image; with a commit as ref, all starts run the same"
        )
        yield _key(task, "workdir", what)


def _recovery(task: Task) -> Iterator[UnsupportedKey]:
    if task.num_nodes > 1:
        what = (
            "if a node is lost without notice, the errors of the others come first, and count for "
            "max_restarts_on_errors"
        )
        yield _key(task, "resources.job_recovery", what)
