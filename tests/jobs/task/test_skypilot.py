"""What we hand over is taken by SkyPilot's own parser, installed for this test in its own environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from holdfast.jobs.task.handover import to_yaml
from holdfast.jobs.task.reading import Overrides, parse_task
from jobs.task.guide import SNIPPETS

VERSION = "0.14.1"
ENVIRONMENT = Path(tempfile.gettempdir()) / f"holdfast-test-skypilot-{VERSION}-{os.getuid()}"
"""Kept between runs: it is made of about 95 packages."""

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


def sky_python() -> str:
    """An interpreter that has SkyPilot; skips where it cannot be installed."""
    python = ENVIRONMENT / "bin" / "python"
    whole = ENVIRONMENT / "whole"
    if whole.exists():
        return str(python)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(ENVIRONMENT)], check=True)
    words = [
        str(python),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        f"skypilot=={VERSION}",
    ]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"SkyPilot could not be installed: {done.stderr.strip().splitlines()[-1:]}")
    whole.touch()
    return str(python)


def parse(files: dict[str, str], folder: Path) -> dict[str, object]:
    """What SkyPilot's parser makes of each file."""
    paths = {}
    for name, text in files.items():
        path = folder / f"{name}.yaml"
        path.write_text(text)
        paths[name] = str(path)
    home = folder / "home"  # SkyPilot writes there, and must not find anybody's configuration
    home.mkdir(exist_ok=True)
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    done = subprocess.run(
        [sky_python(), "-c", PARSE],
        input=json.dumps(paths),
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_skypilot_takes_what_we_hand_over(tmp_path: Path) -> None:
    tasks = {
        name: parse_task(
            text, f"{name}.yaml", Overrides(envs={"WANDB_API_KEY": "key"} if name == "bert" else {})
        )
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
def test_skypilot_refuses_the_guide_s_own_form(tmp_path: Path) -> None:
    """Else nobody would need what we make of it."""
    told = parse({"accelerators": SNIPPETS["accelerators"]}, tmp_path)
    assert "ValueError" in str(told["accelerators"])
