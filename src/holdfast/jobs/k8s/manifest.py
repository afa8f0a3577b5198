"""Manifests of Kubernetes: objects that run a task, from `objects.yaml` and the user's own settings.

Source: SkyPilot, whose key `config.kubernetes.pod_config` has these settings. Maps are merged, lists are
joined, and the first container is the training's. The API server checks names and labels.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Mapping
from typing import Any

import yaml
from typing_extensions import override

from holdfast.errors import HUNG_STATUS, PREEMPTED_STATUS, InvalidInput, Unsupported
from holdfast.jobs.environment import (
    TAG,
    UNBUFFERED,
    add_notice_file,
    conda_start,
    read_packaged,
    setup_variables,
    sky_variables,
)
from holdfast.jobs.task.document import fill_in, read_table
from holdfast.jobs.task.model import SKY_WORKDIR, Task, image_id, memory_mib, parse_cpus, value_at
from holdfast.system.environment import KEEP_IN_MEMORY, PREEMPTION

Object = dict[str, Any]  # object of Kubernetes
Volume = tuple[str, str, Mapping[str, Any]]  # name, path and source
QUEUE = "config.kubernetes.kueue.local_queue_name"  # a queue of Kueue, as SkyPilot reads it too
_MAX_RESTARTS = "resources.job_recovery.max_restarts_on_errors"
_WORKDIR = "/workdir"  # path of the clone of the task's repository
_RESERVED = ("/", _WORKDIR, "/dev/shm", "/proc", "/sys", "/dev", "/tmp")
_NAMESPACE = "HOLDFAST_NAMESPACE"
_NOTICE = "/tmp/holdfast-notice"
_NODE_RANKS = ("SKYPILOT_NODE_RANK", "SKYPILOT_SETUP_NODE_RANK")
_IMAGE = re.compile(r"docker:([A-Za-z0-9][\w./:@-]*)", re.A)
_MAX_WORD_BYTES = 128 * 1024 - 1  # longest argument or variable that Linux accepts
_RETRIED = 143  # exit status for which a PyTorchJob restarts a pod, as for any other from 128 on


def make_object(task: Task, kind: str) -> Object:
    """Return the object that runs a task: a Job, a JobSet, whose nodes restart together, or a PyTorchJob.

    The training operator does not count failures apart from preemptions, so pods of a PyTorchJob restart
    `run` in place after errors. Their scripts derive their rank.
    """
    name, num_nodes = object_name(task), _at_most(task, "num_nodes", task.num_nodes, 5000, " nodes")
    max_restarts = _at_most(task, _MAX_RESTARTS, task.recovery.max_restarts, 2**31 - 1)
    queue = value_at(task.document, QUEUE)
    if kind == "Job":
        pod = _pod(task, "training", ["localhost"], {"value": "0"})
    elif kind == "JobSet":
        addresses = [f"{name}-node-0-{rank}.{name}" for rank in range(num_nodes)]
        index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
        pod = _pod(task, "training", addresses, _value_from("fieldRef", fieldPath=index))
    else:
        addresses = [f"{name}-master-0", *(f"{name}-worker-{rank}" for rank in range(num_nodes - 1))]
        pod = _pod(task, "pytorch", addresses, None, status=_RETRIED, in_place=max_restarts)
    if kind != "PyTorchJob":  # whose replicas have one
        pod["spec"]["restartPolicy"] = "Never"
    values = {
        "name": name,
        "object labels": labels(task) | ({"kueue.x-k8s.io/queue-name": queue} if queue is not None else {}),
        "max restarts": max_restarts,
        "preempted": PREEMPTED_STATUS,
        "num nodes": num_nodes,
        "num workers": num_nodes - 1,
        "pod": pod,
    }
    values["workers"] = _template("workers", values) if num_nodes > 1 else None
    return _template(kind, values)


def secret_name(task: Task) -> str:
    """Return the name of the Secret with the values of a task's `secrets`."""
    return f"{object_name(task)}-secrets"


def pod_arguments(task: Task, *, status: int, in_place: int, grace_s: int) -> list[str]:
    """Return the arguments of `pod.sh`, not escaped.

    The shell is the first process of the container. It exits with `status` if `run` fails after a notice, or
    exits with 75, 63 or one of `recover_on_exit_codes`. It restarts `run` `in_place` times after errors.
    Keepers of the training have up to `grace_s` seconds to complete saves, because they end with the pod.
    """
    free_codes = sorted({PREEMPTED_STATUS, HUNG_STATUS, *task.recovery.free_codes})
    numbers = [str(status), " ".join(map(str, free_codes)), str(in_place), str(grace_s)]
    needs_link = "yes" if SKY_WORKDIR in task.setup + task.run else "no"
    return ["holdfast", task.setup, task.run, *numbers, conda_start(task.setup, task.run), needs_link]


def _template(name: str, values: Mapping[str, Any]) -> Any:
    return _fill(read_table("k8s/objects.yaml")[name], values)


def _fill(node: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(node, dict):
        found = {key: _fill(value, values) for key, value in node.items()}
        return {key: value for key, value in found.items() if value is not None}
    if isinstance(node, list):
        return [_fill(item, values) for item in node]
    is_value = isinstance(node, str) and node.startswith("<")
    return values[node[1:-1]] if is_value else node


def _pod(
    task: Task,
    container: str,
    addresses: list[str],
    rank: Mapping[str, Any] | None,
    *,
    status: int = PREEMPTED_STATUS,
    in_place: int = 0,
) -> Object:
    """Return the template of a task's pods; see `pod_arguments`. Without `rank`, their script derives it."""
    _check_files(task)
    time_s = _grace_s(task)
    volumes = _volumes(task)
    chosen = set(_pod_config(task).get("spec", {}))
    arguments = pod_arguments(task, status=status, in_place=in_place, grace_s=time_s)
    values = {
        "labels": labels(task),
        # Istio's sidecar would intercept the connections of the training, and keep the pod running after it.
        "annotations": {"sidecar.istio.io/inject": "false"} if rank is None else None,
        "grace s": time_s,
        "container": container,
        "image": _image(task),
        "script": escape(read_packaged("k8s/pod.sh")),
        "clone script": escape(read_packaged("k8s/clone.sh")),
        "arguments": [escape(word) for word in arguments],
        "env": _environment(task, addresses, rank, time_s),
        "mounts": [{"name": name, "mountPath": path} for name, path, _ in volumes],
        "volumes": [{"name": name, **source} for name, _, source in volumes],
        "workdir": None if task.repository is None else _WORKDIR,
        "ref": task.repository and escape(task.repository.ref or ""),
        "resources": _requirements(task) or None,
        "affinity": None if chosen & {"affinity", "nodeSelector"} else _affinity(task) or None,
        "priority class": value_at(task.document, "resources.priority_class"),
    }
    values["clone"] = None if task.repository is None else _template("clone", values)
    found = _template("pod", values)
    _check_sizes(task, found["spec"]["containers"][0])
    return _merged(task, found, _pod_config(task))


def _environment(
    task: Task, addresses: list[str], rank: Mapping[str, Any] | None, grace_s: int
) -> list[dict[str, Any]]:
    """Return the variables of the task, SkyPilot's and Holdfast's. Each may refer to those before it."""
    _, num_gpus = gpu_choice(task)
    first = {
        _NAMESPACE: _value_from("fieldRef", fieldPath="metadata.namespace"),
        TAG: _value_from("fieldRef", fieldPath="metadata.name"),
    }
    # An id that is the same after every restart. Two namespaces may have jobs of one name.
    common = sky_variables(f"$({_NAMESPACE})-{object_name(task)}", addresses, num_gpus)
    ours = {
        **common,
        **setup_variables(common),
        PREEMPTION: escape(add_notice_file(task.envs.get(PREEMPTION, "auto"), _NOTICE)),
    }
    defaults = {
        # torchrun kills its workers after 30 s by default, even if the pod has more time.
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(grace_s),
        # A keeper ends with its pod, so its memory is of no use to the next attempt.
        KEEP_IN_MEMORY: "0",
        **UNBUFFERED,
    }
    variables: dict[str, Any] = {
        **first,
        **defaults,
        **{name: escape(value) for name, value in task.envs.items()},
        **{name: _value_from("secretKeyRef", name=secret_name(task), key=name) for name in task.secrets},
        **first,
        **ours,
        **({} if rank is None else {name: dict(rank) for name in _NODE_RANKS}),
        **({} if task.repository is None else {"HOLDFAST_WORKDIR_URL": _repository_url(task)}),
    }
    return [
        {"name": name, **(found if isinstance(found, dict) else {"value": found})}
        for name, found in variables.items()
    ]


def _value_from(kind: str, **place: str) -> dict[str, Any]:
    return {"valueFrom": {kind: place}}


def _repository_url(task: Task) -> str:
    marked = {name: f"\0{name}\0" for name in task.secrets}  # no value contains this character
    url = str(fill_in(task.document["workdir"]["url"], {**task.envs, **marked}))
    return re.sub("\0(.*?)\0", r"$(\1)", escape(url))  # Kubernetes puts in the value of a variable


def _volumes(task: Task) -> list[Volume]:
    """Return the volumes: shared memory, the workdir, and claims that exist."""
    # The default of 64 MiB is too small for the workers of a DataLoader.
    found: list[Volume] = [("shared-memory", "/dev/shm", {"emptyDir": {"medium": "Memory"}})]
    if task.repository is not None:
        found.append(("workdir", _WORKDIR, {"emptyDir": {}}))
    for number, (path, value) in enumerate((task.document.get("volumes") or {}).items()):
        claim = {"claimName": _claim(task, str(path), value)}
        found.append((f"volume-{number}", str(path), {"persistentVolumeClaim": claim}))
    return found


def _claim(task: Task, path: str, value: Any) -> str:
    key = f"volumes.{path}"
    is_plain = path.startswith("/") and posixpath.normpath(path) == path and not set(path) & set(":\0\n")
    if not is_plain or path in _RESERVED:
        what = f"expected an absolute path without `..`, that is not used otherwise, found {path[:100]!r}."
        raise invalid(task, key, what)
    name = value.get("name") if isinstance(value, Mapping) and set(value) == {"name"} else value
    if not isinstance(name, str):
        found = f"found {str(value)[:100]!r}. No volume is created."
        raise invalid(task, key, f"expected the name of a persistent volume claim that exists, {found}")
    return name


def _image(task: Task) -> str:
    asked = image_id(task)
    found = _IMAGE.fullmatch(str(asked or ""))
    if found is None:
        what = "expected the container image of the training, such as docker:registry.example/gpt:1, found "
        raise invalid(task, "resources.image_id", f"{what}{str(asked)[:200]!r}.")
    return found[1]


def _check_files(task: Task) -> None:
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


def _at_most(task: Task, key: str, value: int, limit: int, noun: str = "") -> int:
    if value > limit:
        raise invalid(task, key, f"expected at most {limit}{noun}, found {value}.")
    return value


def _check_sizes(task: Task, training: Mapping[str, Any]) -> None:
    words = [*training["command"], *training["args"]]
    words += [f"{variable['name']}={variable.get('value', '')}" for variable in training["env"]]
    for word in words:
        if "\0" in word:
            raise invalid(task, "run", "expected scripts and variables without NUL characters.")
        if len(word.encode()) > _MAX_WORD_BYTES:
            what = f"expected scripts, variables and lists of nodes of less than {_MAX_WORD_BYTES} bytes, "
            raise invalid(task, "run", f"{what}found one with {len(word.encode())}: {word[:60]!r}...")


_GRACE_S = 120  # default time between SIGTERM and the end of a pod. A cloud may reclaim a machine sooner.
_MAX_GRACE_S = 2**31 - 1
_IDENTITY = {"volumeMounts": "mountPath", "tolerations": "", "imagePullSecrets": "name"}
"""Member that identifies an item of a list, if it is not `name`. Empty: items are never merged."""
_KINDS = {dict: "map", list: "list"}
_OURS = ("restartPolicy", "hostname", "subdomain")


def _pod_config(task: Task) -> Mapping[str, Any]:
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


def _grace_s(task: Task) -> int:
    """Return the time between SIGTERM and the end of a pod."""
    found = _pod_config(task).get("spec", {}).get("terminationGracePeriodSeconds", _GRACE_S)
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


def _merged(task: Task, ours: Any, theirs: Any, where: str = "") -> Any:
    """Return Holdfast's part of a pod template, merged with the user's part at the same place."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        merged = dict(ours)
        for key, value in theirs.items():
            path = f"{where}.{key}" if where else key
            merged[key] = _merged(task, ours[key], value, path) if key in ours else value
        return merged
    if where == "spec.containers":
        (training,) = ours
        settings = {key: value for one in theirs for key, value in one.items() if key != "name"}
        return [_merged(task, training, settings, f"{where}[0]")]
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
    return models, int(count)


def _requirements(task: Task) -> dict[str, Any]:
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


def _affinity(task: Task) -> dict[str, Any]:
    """Return the affinity for nodes with the GPUs of a task, by any label; empty if it needs none."""
    models, _ = gpu_choice(task)
    values = {"skypilot.co/accelerator": [model.lower() for model in models]}
    for label, names in read_table("k8s/gpu_labels.yaml").items():
        values[label] = [name for model in models for name in names.get(model.upper(), ())]
    # Terms are alternatives: a cluster has one of these labels, and usually not the others.
    terms = [
        {"matchExpressions": [{"key": label, "operator": "In", "values": found}]}
        for label, found in values.items()
        if found
    ]
    wanted = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    return {"nodeAffinity": wanted} if terms else {}


POD_CONFIG = "config.kubernetes.pod_config"  # the user's own settings of pods, in SkyPilot's form
_MAX_NAME = 40  # longest name of a job: pods and services append to it, and have at most 63 characters


def invalid(task: Task, key: str, what: str) -> InvalidInput:
    """Return the error for an invalid value."""
    return InvalidInput(f"{task.where(key)}: {what} Nothing was started.")


def unsupported(task: Task, key: str, what: str) -> Unsupported:
    """Return the error for a key that Kubernetes cannot provide; see `invalid`."""
    return Unsupported(f"{task.where(key)}: {what} Nothing was started.")


def object_name(task: Task) -> str:
    """Return the name of a task's job: a DNS label that begins with a letter."""
    plain = re.sub(r"[^a-z0-9]+", "-", task.name.lower()).strip("-")
    found = plain if plain[:1].isalpha() else f"job-{plain}".rstrip("-")
    # A shortened name could be that of another job, whose checkpoints this one would then continue.
    if not plain or len(found) > _MAX_NAME:
        what = (
            f"expected a name of at most {_MAX_NAME} letters, digits and dashes, found {task.name[:100]!r}. "
            "Give another one with --name."
        )
        raise invalid(task, "name", what)
    return found


def labels(task: Task) -> dict[str, str]:
    """Return the labels of a task's objects: Holdfast's, and those in `resources.labels`."""
    ours = {"app.kubernetes.io/name": object_name(task), "app.kubernetes.io/managed-by": "holdfast"}
    asked = (task.document.get("resources") or {}).get("labels") or {}
    theirs = {str(key): "" if value is None else str(value) for key, value in asked.items()}
    return {**ours, **theirs, **ours}


# Readers differ about words such as y, on and 1e3. So only words that cannot be anything else are not quoted.
_PLAIN = re.compile(r"[A-Za-z/][\w./-]*", re.A)
_WORDS = frozenset(("y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"))
_OTHER_BREAKS = re.compile("[\r\x85\u2028\u2029]")  # line breaks in YAML 1.1 only
_NEVER_FOLDED = 10**9
_REPLACED = re.compile(r"\$(?=[$(])")


class _Dumper(yaml.SafeDumper):
    """Dumper without anchors that quotes text unless it cannot be anything else."""

    @override
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent(dumper: yaml.SafeDumper, text: str) -> Any:
    is_plain = _PLAIN.fullmatch(text) and text.lower() not in _WORDS
    is_block = "\n" in text and not _OTHER_BREAKS.search(text)
    style = "|" if is_block else None if is_plain else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent)


def to_manifest(document: Mapping[str, Any], comments: Iterable[str]) -> str:
    """Return a manifest that begins with comments."""
    body = yaml.dump(dict(document), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=_NEVER_FOLDED)
    return "".join(f"# {line}\n" for line in comments) + body


def escape(text: str) -> str:
    """Return text that Kubernetes turns back into `text`: it replaces `$(NAME)`, and `$$` by `$`."""
    return _REPLACED.sub("$$", text)
