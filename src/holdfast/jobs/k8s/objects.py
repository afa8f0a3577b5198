"""Objects of Kubernetes that run a task: Job, JobSet and PyTorchJob; pure.

Source: the schemas of batch/v1, jobset.x-k8s.io/v1alpha2 and kubeflow.org/v1, and the documentation of
JobSet's failure policies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.errors import PREEMPTED_STATUS
from holdfast.jobs.k8s.names import is_subdomain, labels, object_name
from holdfast.jobs.k8s.pod_script import RestartRule
from holdfast.jobs.k8s.pod_template import Container, pod_template
from holdfast.jobs.k8s.refusal import invalid, unsupported
from holdfast.jobs.task.model import Task
from holdfast.jobs.unsupported_keys import value_at

QUEUE = "config.kubernetes.kueue.local_queue_name"
"""Key of a task file for a queue of Kueue, which SkyPilot reads too."""
_TRAINING = "training"
_NODE = "node"
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_MAX_NODES = 5000
_MAX_RESTARTS = 2**31 - 1
_RETRIED = 143
"""Exit status for which a PyTorchJob restarts a pod, as for any other from 128 on."""

Object = dict[str, Any]
"""Object of Kubernetes."""


def job(task: Task) -> Object:
    """Return the Job of a task with one node. Preempted pods are replaced, which does not count as a failure.

    Raises:
        InvalidInput: Kubernetes would reject a value of the task.
        Unsupported: Kubernetes cannot provide what the task requests.
    """
    check(task)
    container = Container(_TRAINING, ("localhost",), {"value": "0"}, RestartRule())
    spec = _job_spec(pod_template(task, container), action="Ignore", failures=_max_restarts(task))
    return _object(task, "batch/v1", "Job", spec)


def job_set(task: Task) -> Object:
    """Return the JobSet of a task with several nodes, which are restarted together; see `job`.

    JobSet creates the headless service through which pods find each other. A preempted pod fails the inner
    Job, and the JobSet restarts it without counting. Any other failure counts.
    """
    check(task)
    name = object_name(task)
    addresses = tuple(f"{name}-{_NODE}-0-{rank}.{name}" for rank in range(task.num_nodes))
    rank = {"valueFrom": {"fieldRef": {"fieldPath": _INDEX}}}
    template = pod_template(task, Container(_TRAINING, addresses, rank, RestartRule()))
    count = {"completions": task.num_nodes, "parallelism": task.num_nodes, "completionMode": "Indexed"}
    inner = {**count, **_job_spec(template, action="FailJob", failures=0)}
    preempted = {
        "name": "preempted",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    spec = {
        "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
        "failurePolicy": {
            "maxRestarts": _max_restarts(task),
            # Two attempts never run at the same time.
            "restartStrategy": "BlockingRecreate",
            "rules": [preempted],
        },
        "replicatedJobs": [{"name": _NODE, "replicas": 1, "template": {"spec": inner}}],
    }
    return _object(task, "jobset.x-k8s.io/v1alpha2", "JobSet", spec)


def pytorch_job(task: Task) -> Object:
    """Return the PyTorchJob of a task; see `job`.

    The training operator does not count failures apart from preemptions, so pods restart `run` in place after
    errors.
    """
    check(task)
    name = object_name(task)
    addresses = (f"{name}-master-0", *(f"{name}-worker-{one}" for one in range(task.num_nodes - 1)))
    rule = RestartRule(_RETRIED, _max_restarts(task))
    template = pod_template(task, Container("pytorch", addresses, None, rule))
    # Istio's sidecar would intercept the connections of the training, and keep the pod running after it.
    annotations = {"sidecar.istio.io/inject": "false", **template["metadata"].get("annotations", {})}
    template = {**template, "metadata": {**template["metadata"], "annotations": annotations}}
    replica = {"restartPolicy": "ExitCode", "template": template}
    replicas = {"Master": {"replicas": 1, **replica}}
    if task.num_nodes > 1:
        replicas["Worker"] = {"replicas": task.num_nodes - 1, **replica}
    return _object(task, "kubeflow.org/v1", "PyTorchJob", {"pytorchReplicaSpecs": replicas})


def check(task: Task) -> None:
    """Check what does not depend on the kind of object.

    Raises:
        InvalidInput: Kubernetes would reject a value of the task.
        Unsupported: Kubernetes cannot provide what the task requests.
    """
    if task.workdir is not None:
        what = (
            "a folder of this machine cannot be uploaded to a cluster. Put the files into the image, or give "
            "a git repository: workdir: {url: ..., ref: ...}."
        )
        raise unsupported(task, "workdir", what)
    for mount in task.file_mounts:
        what = (
            "Kubernetes mounts neither buckets nor files of this machine. Pass the bucket's URL to the "
            "training, or mount a persistent volume claim: volumes: {/mnt/data: NAME-OF-CLAIM}."
        )
        raise unsupported(task, f"file_mounts.{mount.target}", what)
    if task.num_nodes > _MAX_NODES:
        raise invalid(task, "num_nodes", f"expected at most {_MAX_NODES} nodes, found {task.num_nodes}.")


def _max_restarts(task: Task) -> int:
    found = task.recovery.max_restarts
    if found > _MAX_RESTARTS:
        key = "resources.job_recovery.max_restarts_on_errors"
        raise invalid(task, key, f"expected at most {_MAX_RESTARTS}, found {found}.")
    return found


def _job_spec(template: Mapping[str, Any], *, action: str, failures: int) -> Object:
    """Return the spec of a Job with an action for pods that were preempted."""
    statuses = {"containerName": _TRAINING, "operator": "In", "values": [PREEMPTED_STATUS]}
    disruption = {"type": "DisruptionTarget", "status": "True"}
    rules = [
        {"action": action, "onExitCodes": statuses},
        {"action": action, "onPodConditions": [disruption]},
    ]
    return {
        "backoffLimit": failures,
        "podFailurePolicy": {"rules": rules},
        # A pod is replaced when it has ended, not when it is notified.
        "podReplacementPolicy": "Failed",
        "template": {**template, "spec": {**template["spec"], "restartPolicy": "Never"}},
    }


def _object(task: Task, version: str, kind: str, spec: Mapping[str, Any]) -> Object:
    queue = value_at(task.document, QUEUE)
    if queue is not None and not (isinstance(queue, str) and is_subdomain(queue) and len(queue) <= 63):
        raise invalid(task, QUEUE, f"expected the name of a LocalQueue, found {str(queue)[:100]!r}.")
    metadata: Object = {"name": object_name(task), "labels": labels(task)}
    if queue is not None:
        metadata["labels"] |= {"kueue.x-k8s.io/queue-name": queue}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": dict(spec)}
