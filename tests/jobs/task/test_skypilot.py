"""Rendered tasks are accepted by SkyPilot's own parser, installed for this test."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from holdfast.errors import HUNG_STATUS, PREEMPTED_STATUS
from holdfast.jobs.sky.engine import render_document
from holdfast.jobs.task.document import to_yaml
from holdfast.jobs.task.parser import Overrides, parse_tasks
from jobs.sky.installed import skypilot
from jobs.task.guide import SNIPPETS

PARSE = """
import json, sys
import sky
told = {}
for name, path in json.load(sys.stdin).items():
    try:
        task = sky.Task.from_yaml(path)
    except Exception as error:
        told[name] = f"{type(error).__name__}: {error}"
    else:
        told[name] = {
            "name": task.name,
            "num_nodes": task.num_nodes,
            "accelerators": sorted(str(one.accelerators) for one in task.resources),
            "run": task.run,
            "free": [(one.job_recovery or {}).get("recover_on_exit_codes") for one in task.resources][:1],
            "hooks": [hook["events"] for one in task.resources for hook in one.hooks or []][:1],
        }
json.dump(told, sys.stdout)
"""

MORE = {
    "everything": """
name: all
num_nodes: 2
resources:
  cpus: 4+
  memory: 16GB
  accelerators: {A100: 8}
  use_spot: true
  disk_tier: best
  disk_size: 500
  network_tier: best
  labels: {team: x}
  ports: [8080, 9000-9010]
  job_recovery: {max_restarts_on_errors: 3, recover_on_exit_codes: [33, 34]}
file_mounts:
  /data:
    name: ${BUCKET}
    store: s3
    mode: MOUNT
  /models:
    name: my-models
    mode: MOUNT_CACHED
envs: {BUCKET: some-bucket, LR: 3e-4, N: 3}
setup: |
  echo one
  echo two
run: |
  echo run
""",
    "any-of": """
resources:
  any_of:
    - {infra: aws, accelerators: A100:8}
    - {infra: gcp, accelerators: H100:8, use_spot: true}
run: x
""",
    "list": "resources: {accelerators: [A100:1, V100:2]}\nrun: x\n",
    "set": "resources: {accelerators: {A100:1, V100:2}}\nrun: x\n",
    "strategy": "resources: {job_recovery: failover}\nrun: x\n",
}


def parse(files: dict[str, str], folder: Path) -> dict[str, object]:
    """Return SkyPilot's result of parsing each file."""
    paths = {}
    for name, text in files.items():
        path = folder / f"{name}.yaml"
        path.write_text(text)
        paths[name] = str(path)
    home = folder / "home"  # SkyPilot writes there, and must not find anybody's configuration
    home.mkdir(exist_ok=True)
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    words, given = [str(skypilot() / "python"), "-c", PARSE], json.dumps(paths)
    done = subprocess.run(
        words, input=given, env=environment, cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_skypilot_accepts_rendered_tasks(tmp_path: Path) -> None:
    tasks = {
        name: parse_tasks(
            text, f"{name}.yaml", Overrides(envs={"WANDB_API_KEY": "key"} if name == "bert" else {})
        ).only()
        for name, text in {**SNIPPETS, **MORE}.items()
    }
    (tmp_path / "transformers").mkdir()
    files = {name: to_yaml(task).replace("~/transformers", str(tmp_path)) for name, task in tasks.items()}
    told = parse(files, tmp_path)
    for name, task in tasks.items():
        found = told[name]
        assert isinstance(found, dict), f"{name}: {found}\n{files[name]}"
        assert (found["name"], found["num_nodes"], found["run"]) == (task.name, task.num_nodes, task.run)
    folded = told["accelerators"]
    assert isinstance(folded, dict)
    assert folded["accelerators"] == ["{'A100': 1}", "{'A100-80GB': 1}", "{'H100': 1}"]


@pytest.mark.slow
def test_skypilot_accepts_what_the_engine_submits(tmp_path: Path) -> None:
    """Including the additions: Holdfast's id and statuses, a hook, and caches with sequential uploads."""
    envs = Overrides(envs={"WANDB_API_KEY": "key"})
    tasks = {
        name: parse_tasks(text, f"{name}.yaml", envs).only() for name, text in {**SNIPPETS, **MORE}.items()
    }
    (tmp_path / "transformers").mkdir()
    texts = {name: render_document(task, "sky-managed-x_1-0", "1") for name, task in tasks.items()}
    told = parse({name: _with_folder(text, tmp_path) for name, text in texts.items()}, tmp_path)
    for name, task in tasks.items():
        found = told[name]
        assert isinstance(found, dict), f"{name}: {found}\n{texts[name]}"
        assert str(found["run"]).endswith(task.run)
        assert found["free"] == [sorted({*task.recovery.free_codes, PREEMPTED_STATUS, HUNG_STATUS})]
        assert found["hooks"] == [["preemption"]]


def _with_folder(text: str, folder: Path) -> str:
    """The guide's workdir is in a user's home."""
    return text.replace(str(Path("~/transformers").expanduser()), str(folder))


@pytest.mark.slow
def test_skypilot_rejects_the_guide_s_own_form(tmp_path: Path) -> None:
    """Otherwise the conversion would be unnecessary."""
    told = parse({"accelerators": SNIPPETS["accelerators"]}, tmp_path)
    assert "ValueError" in str(told["accelerators"])
