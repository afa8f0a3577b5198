"""Manifests for Kubernetes: valid by the published schemas, without secrets, or refused with a line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.errors import InvalidInput, Unsupported
from holdfast.jobs.k8s.engine import K8sEngine, KubeflowEngine, ManifestEngine
from holdfast.jobs.k8s.manifest import escape, to_manifest
from holdfast.jobs.task.model import Task
from holdfast.jobs.task.parser import Overrides, load_tasks, parse_tasks
from jobs.k8s.published import (
    CRDS,
    JOBSET,
    KUBERNETES,
    TRAINING_OPERATOR,
    problems_of_core,
    problems_of_custom,
)

GOLDEN = Path(__file__).parent / "golden"
SECRET = "hunter2-never-shown"
IMAGE = "resources: {image_id: docker:a}\n"
POD = "config: {kubernetes: {pod_config: %s}}"
SPEC = POD % "{spec: %s}"


def task(text: str) -> Task:
    if "resources:" not in text:
        text = IMAGE + text
    elif "image_id" not in text:
        text = text.replace("resources: {", "resources: {image_id: docker:a, ")
    text = text if "run:" in text else f"{text}\nrun: x\n"
    return parse_tasks(text, "task.yaml", Overrides(secrets={"TOKEN": SECRET})).only()


def manifest(asked: Task, engine: ManifestEngine) -> str:
    command, *lines = engine.render(asked)
    assert command == "$ kubectl apply -f job.yaml"
    return "".join(f"{line}\n" for line in lines)


def document(text: str, engine: type[ManifestEngine] = K8sEngine) -> Any:
    return yaml.safe_load(manifest(task(text), engine()))


def pod(found: Any) -> Any:
    """Return the pod template of an object, of its first node."""
    spec = found["spec"]
    if found["kind"] == "JobSet":
        spec = spec["replicatedJobs"][0]["template"]["spec"]
    if found["kind"] == "PyTorchJob":
        spec = spec["pytorchReplicaSpecs"]["Master"]
    return spec["template"]


def container(found: Any) -> Any:
    return pod(found)["spec"]["containers"][0]


def variables(found: Any) -> dict[str, Any]:
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in container(found)["env"]}


def problems(found: Any) -> list[str]:
    """Return what the schemas of Kubernetes object to, in the parts of an object that are its own."""
    spec, parts = found["spec"], [(found["metadata"], "apimachinery.pkg.apis.meta.v1.ObjectMeta")]
    if found["kind"] == "Job":
        parts.append((found, "api.batch.v1.Job"))
    parts += [(one["template"], "api.batch.v1.JobTemplateSpec") for one in spec.get("replicatedJobs", ())]
    replicas = spec.get("pytorchReplicaSpecs", {}).values()
    parts += [(one["template"], "api.core.v1.PodTemplateSpec") for one in replicas]
    every = [(*part, version) for version in KUBERNETES for part in parts]
    return [one for part, kind, version in every for one in problems_of_core(part, f"io.k8s.{kind}", version)]


def custom_problems(found: Any) -> list[str]:
    """Return what the published custom resource definitions object to."""
    if found["kind"] == "JobSet":
        return [one for version in JOBSET for one in problems_of_custom(found, f"jobset-{version}.yaml")]
    versions = TRAINING_OPERATOR if found["kind"] == "PyTorchJob" else ()
    return [one for version in versions for one in problems_of_custom(found, f"pytorchjob-{version}.yaml")]


CASES = [
    ("one", K8sEngine(), "Job"),
    ("two", K8sEngine(), "JobSet"),
    ("one", KubeflowEngine(), "PyTorchJob"),
    ("two", KubeflowEngine(), "PyTorchJob"),
]


@pytest.mark.parametrize(("name", "engine", "kind"), CASES)
def test_the_manifest_is_the_golden_one(name: str, engine: ManifestEngine, kind: str) -> None:
    """After a change, write the files anew with `holdfast launch FILE --on NAME --dry-run -o FILE`."""
    secrets = {"TOKEN": SECRET} if name == "two" else {}
    asked = load_tasks(GOLDEN / f"{name}.task.yaml", Overrides(secrets=secrets)).only()
    found = manifest(asked, engine)
    assert found == (GOLDEN / f"{name}.{engine.name}.yaml").read_text()
    assert yaml.safe_load(found)["kind"] == kind
    assert SECRET not in found


@pytest.mark.parametrize(("name", "engine", "kind"), CASES)
def test_the_manifest_fits_the_published_schemas(name: str, engine: ManifestEngine, kind: str) -> None:
    found = yaml.safe_load((GOLDEN / f"{name}.{engine.name}.yaml").read_text())
    assert problems(found) == []
    if kind == "Job":  # of Kubernetes itself
        return
    assert custom_problems(found) == []
    # The schemas would find a misspelled field, which a server drops in silence.
    container(found)["enviroment"] = []
    assert "enviroment" in str(custom_problems(found))
    assert "enviroment" in str(problems(found))


def test_secrets_are_references_wherever_the_task_uses_them() -> None:
    workdir = "workdir: {url: 'https://me:${TOKEN}@host/$(x)${A}'}"
    text = f"name: gpt\nsecrets: {{TOKEN: null}}\n{workdir}\nenvs: {{A: '$(y)'}}"
    found = document(text)
    reference = {"secretKeyRef": {"name": "gpt-secrets", "key": "TOKEN"}}
    assert variables(found)["TOKEN"] == reference
    assert variables(found)["HOLDFAST_WORKDIR_URL"] == "https://me:$(TOKEN)@host/$$(x)$$(y)"
    shown = manifest(task(text), K8sEngine())
    assert SECRET not in shown
    assert 'kubectl create secret generic gpt-secrets --from-literal=TOKEN="$TOKEN"' in shown


def test_holdfast_s_variables_override_those_of_the_task() -> None:
    asked = "{SKYPILOT_NUM_NODES: 9, HOLDFAST_PREEMPTION: aws, TORCH_ELASTIC_SHUTDOWN_TIMEOUT: 7}"
    text = f"envs: {asked}\nname: gpt"
    found = variables(document(text))
    assert found["SKYPILOT_NUM_NODES"] == "1"
    assert found["HOLDFAST_PREEMPTION"] == "aws,file:/tmp/holdfast-notice"
    assert found["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "7"
    assert found["SKYPILOT_TASK_ID"] == "$(HOLDFAST_NAMESPACE)-gpt"
    names = [one["name"] for one in container(document(text))["env"]]
    assert names.index("HOLDFAST_NAMESPACE") < names.index("SKYPILOT_TASK_ID")


@pytest.mark.parametrize(
    ("resources", "expected"),
    [
        ("cpus: 4+", {"requests": {"cpu": "4"}}),
        ("cpus: 1.5, memory: 64", {"requests": {"cpu": "1500m", "memory": "65536Mi"}}),
        ("memory: 1MB, gpus: L4", {"requests": {"memory": "1Mi"}, "limits": {"nvidia.com/gpu": "1"}}),
        ("memory: 4x", None),
    ],
)
def test_resources_are_requested(resources: str, expected: object) -> None:
    assert container(document(f"resources: {{{resources}}}")).get("resources") == expected


def test_gpus_are_found_by_any_known_label_unless_the_task_selects_nodes() -> None:
    text = "resources: {accelerators: {A100: 8, H100: 8, T4: 1}}\n"
    spec = pod(document(text))["spec"]
    required = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    terms = [one for term in required["nodeSelectorTerms"] for one in term["matchExpressions"]]
    found = {one["key"]: one["values"] for one in terms}
    assert found["skypilot.co/accelerator"] == ["a100", "h100"]
    assert "nvidia-h100-80gb" in found["cloud.google.com/gke-accelerator"]
    assert "NVIDIA-A100-SXM4-40GB" in found["nvidia.com/gpu.product"]
    chosen = text + SPEC % "{nodeSelector: {pool: big}}"
    spec = pod(document(chosen))["spec"]
    assert "affinity" not in spec
    assert spec["nodeSelector"] == {"pool": "big"}


def test_the_user_s_pod_config_is_merged() -> None:
    text = """
volumes: {/mnt/runs: runs}
config:
  kubernetes:
    kueue: {local_queue_name: research}
    pod_config:
      metadata: {annotations: {owner: me}}
      spec:
        terminationGracePeriodSeconds: 300
        imagePullSecrets: [{name: registry}]
        tolerations: [{key: spot, operator: Exists}, {key: gpu, operator: Exists}]
        volumes: [{name: shared-memory, emptyDir: {sizeLimit: 8Gi, medium: Memory}}]
        containers: [{name: any, imagePullPolicy: Always, env: [{name: A, value: b}]}]
"""
    found = document(text)
    spec = pod(found)["spec"]
    assert pod(found)["metadata"]["annotations"] == {"owner": "me"}
    assert found["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"
    assert spec["terminationGracePeriodSeconds"] == 300
    assert len(spec["tolerations"]) == 2
    assert {one["name"]: one for one in spec["volumes"]} == {
        "shared-memory": {"name": "shared-memory", "emptyDir": {"sizeLimit": "8Gi", "medium": "Memory"}},
        "volume-0": {"name": "volume-0", "persistentVolumeClaim": {"claimName": "runs"}},
    }
    assert container(found)["name"] == "training"
    assert container(found)["imagePullPolicy"] == "Always"
    assert variables(found)["A"] == "b"
    assert container(found)["args"][6] == variables(found)["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "300"
    assert problems(found) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("workdir: .", r"task.yaml:\d: workdir: a folder of this machine cannot be uploaded"),
        ("file_mounts: {/data: s3://bucket/data}", "file_mounts./data: Kubernetes mounts neither buckets"),
        ("resources: {image_id: ami-1}", "expected the container image of the training.*found 'ami-1'"),
        ("resources: {image_id: null}", "found 'None'"),
        ("resources: {accelerators: tpu-v3-8}", "expected a model of NVIDIA GPU, found 'tpu-v3-8'"),
        ("resources: {accelerators: 'T4:0.5'}", "expected a whole number of GPUs from 1 to 1024, found 0.5"),
        ("resources: {job_recovery: {max_restarts_on_errors: 3000000000}}", "expected at most 2147483647"),
        ("name: '日本'", "expected a name of at most 40 letters, digits and dashes"),
        (f"name: {'a' * 41}", "expected a name of at most 40"),
        ("num_nodes: 5001", "expected at most 5000 nodes, found 5001"),
        ("volumes: {data: claim}", "expected an absolute path"),
        ("volumes: {/a/../b: claim}", "expected an absolute path"),
        ("volumes: {/data: {name: claim, size: 10Gi}}", "No volume is created"),
        ('run: "echo \\0"', "without NUL characters"),
        (f"run: echo {'ü' * 70_000}", "of less than 131071 bytes, found one with 140005"),
        (POD % "[1]", "expected a map with metadata and spec"),
        (SPEC % "{restartPolicy: Always}", "Holdfast sets spec.restartPolicy"),
        (SPEC % "{containers: [{args: [a]}]}", r"sets spec.containers\[0\].args"),
        (SPEC % "{containers: [{}, {}]}", "expected one container"),
        (SPEC % "{volumes: {a: b}}", "expected a list as spec.volumes, found a map"),
        (POD % "{metadata: {labels: 2020-01-01}}", "expected a map"),
        (SPEC % "{terminationGracePeriodSeconds: 0}", "expected a positive number"),
    ],
)
@pytest.mark.parametrize("engine", [K8sEngine(), KubeflowEngine()])
def test_what_kubernetes_cannot_do_is_refused_with_its_line(text: str, said: str, engine: ManifestEngine):
    with pytest.raises((InvalidInput, Unsupported), match=said) as refused:
        engine.check(task(text))
    assert re.match(r"task\.yaml:\d+: ", str(refused.value))
    assert "Nothing was started" in str(refused.value)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("gpt", "gpt"), ("My job!", "my-job"), ("3b", "job-3b"), ("a" * 40, "a" * 40), ("-A_b-", "a-b")],
)
def test_names_are_dns_labels(name: str, expected: str) -> None:
    found = document(f"name: '{name}'\nnum_nodes: {5000 if len(name) < 5 else 500}")
    assert found["metadata"]["name"] == expected
    last = variables(found)["SKYPILOT_NODE_IPS"].split("\n")[-1]
    pod_name = last.partition(".")[0] + "-abcde"  # with the random end that a Job adds
    assert re.fullmatch(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])", pod_name)


def test_keys_with_another_meaning_are_reported() -> None:
    asked = load_tasks(GOLDEN / "two.task.yaml", Overrides(secrets={"TOKEN": SECRET})).only()
    told = {one.key: one.what for one in K8sEngine().unsupported_keys(asked)}
    assert "continues the same training" in told["name"]
    assert "nodeSelector" in told["resources.accelerators"]
    assert "tolerations" in told["resources.use_spot"]
    assert "count for" in told["resources.job_recovery"]
    assert "config.kubernetes.pod_config" not in told
    assert "volumes" not in told
    key = "resources.job_recovery.max_restarts_on_errors"
    assert "in place" in {one.key: one.what for one in KubeflowEngine().unsupported_keys(asked)}[key]
    settings = "config: {kubernetes: {networking: x}, gcp: {}}"
    other = task(f"{settings}\nresources: {{memory: 4x, accelerators: {{L4: 1, T4: 2}}}}")
    told = {one.key: one.what for one in K8sEngine().unsupported_keys(other)}
    assert {"config.kubernetes.networking", "config.gcp", "resources.memory"} <= set(told)
    first = [one.what for one in K8sEngine().unsupported_keys(other) if one.key == "resources.accelerators"]
    assert "without T4" in first[0]


def expand(text: str, known: dict[str, str]) -> str:
    """Replace references as Kubernetes documents it: `$(NAME)` if NAME is known, and `$$` by `$`."""
    pattern = r"\$(?:\$|\(([^)]*)\))"
    return re.sub(pattern, lambda one: "$" if one[0] == "$$" else known.get(one[1], one[0]), text)


@given(st.text(st.sampled_from("$()aB{} "), max_size=20))
def test_kubernetes_turns_escaped_text_back(text: str) -> None:
    assert expand(escape(text), {"a": "wrong", "": "wrong", "B": "wrong"}) == text


@given(st.recursive(st.text(max_size=12), lambda inner: st.lists(inner, max_size=3), max_leaves=5))
def test_all_text_is_read_back(value: Any) -> None:
    assert yaml.safe_load(to_manifest({"a": value}, ["x"])) == {"a": value}


WORDS = ["y", "N", "on", "1e3", "0o17", "0x1f", "1_000", "12:30", ".5", "~", "null", "2001-01-01", "=", "-"]


@pytest.mark.parametrize("word", WORDS)
def test_text_that_readers_may_take_for_something_else_is_quoted(word: str) -> None:
    """YAML 1.1 and 1.2 differ about these, and the server would refuse a number as a variable."""
    assert to_manifest({"a": word, word: "b"}, []) == f'a: "{word}"\n"{word}": b\n'


def maybe(**members: Any) -> Any:
    """Return maps with any of some members."""
    return st.fixed_dictionaries({}, optional=members)


words = st.text(max_size=12)
names = st.from_regex(r"[A-Za-z][A-Za-z0-9_]{0,8}", fullmatch=True)
claims = st.from_regex(r"[a-z][a-z0-9-]{0,5}[a-z0-9]", fullmatch=True)
choices = ["A100:8", "H100", "T4:0.5", "tpu-v3-8", "X/Y", {"L4": 1, "T4": 1}, ["A10", "V100:2"]]
exit_codes = st.lists(st.integers(), max_size=3)
images = st.sampled_from(["docker:a/b:1", "docker:a@sha256:0", "docker:a", "ami-1"])
further = maybe(
    cpus=st.sampled_from(["4+", "x"]) | st.floats() | st.integers(),
    memory=st.sampled_from(["64GB", "x"]) | st.floats() | st.integers(),
    accelerators=st.sampled_from(choices),
    labels=st.dictionaries(words | names, words | names, max_size=2),
    use_spot=st.booleans(),
    priority_class=claims | words,
    job_recovery=maybe(max_restarts_on_errors=st.integers(0, 2**33), recover_on_exit_codes=exit_codes),
)
resources = st.builds(lambda image, more: {"image_id": image, **more}, images, further)
spec = maybe(
    terminationGracePeriodSeconds=st.integers(-1, 2**33),
    nodeSelector=st.dictionaries(names, names, max_size=2),
    tolerations=st.lists(st.fixed_dictionaries({"key": names}), max_size=2),
    containers=st.just([{"imagePullPolicy": "Always", "env": [{"name": "LR", "value": "2"}]}]),
    serviceAccountName=claims,
)
pods = maybe(metadata=maybe(labels=st.dictionaries(names, names, max_size=2)), spec=spec)
paths = st.sampled_from(["/a", "/b/c", "/tmp", "d", "/e/"])
more = maybe(
    name=words | names,
    num_nodes=st.sampled_from([1, 2, 3, 10**20]),
    setup=words,
    envs=st.dictionaries(names, words | st.integers() | st.booleans(), max_size=3),
    secrets=st.dictionaries(names, words, max_size=2),
    volumes=st.dictionaries(paths | words, claims | words, max_size=2),
    workdir=st.builds(lambda url, ref: {"url": url, **ref}, words.filter(bool), maybe(ref=words)),
    config=st.fixed_dictionaries({"kubernetes": maybe(pod_config=pods)}),
)
tasks = st.builds(
    lambda run, found, more: {"run": run, "resources": found, **more}, words.filter(bool), resources, more
)


@pytest.mark.parametrize("engine", [K8sEngine(), KubeflowEngine()])
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(tree=tasks)
def test_any_task_has_a_valid_manifest_or_is_refused(engine: ManifestEngine, tree: Any) -> None:
    try:
        asked = parse_tasks(yaml.safe_dump(tree), "task.yaml").only()
        engine.check(asked)
    except (InvalidInput, Unsupported):
        return
    text = manifest(asked, engine)
    found = yaml.safe_load(text)
    assert problems(found) == []
    if CRDS.is_dir():
        assert custom_problems(found) == []
    assert json.dumps(found)  # nothing but JSON's values
    assert text == manifest(asked, engine)
    engine.unsupported_keys(asked)
    args = container(found)["args"]
    assert [expand(one, {}) for one in args[1:3]] == [asked.setup, asked.run]
