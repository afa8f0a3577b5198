"""Dry run of `make gpu` on the CPU: every part runs and has results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

COMMAND = Path(__file__).parent.parent / "benchmarks" / "gpu" / "run.sh"
PARTS = {"tests", "stalls", "overlap", "restore", "fit", "shard", "compile", "tune", "peers"}
ENVIRONMENT = {**os.environ, "PYTHON": sys.executable}


@pytest.mark.slow
def test_a_dry_run_measures_every_part(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    words = [COMMAND, "--device", "cpu", "--dir", tmp_path / "homes", "--out", out]
    done = subprocess.run(words, check=False, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr
    parts = json.loads(out.read_text())["parts"]
    assert parts.keys() == PARTS
    assert not {name: part["error"] for name, part in parts.items() if "error" in part}
    assert "holdfast blocks" in done.stdout
    assert ET.parse(out.with_suffix(".svg")).getroot().findall(".//{*}rect")


def test_a_machine_without_a_gpu_is_an_error_that_names_the_dry_run() -> None:
    hidden = {**ENVIRONMENT, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([COMMAND], check=False, capture_output=True, text=True, env=hidden)
    assert done.returncode == 2
    assert "no CUDA device. For a dry run: benchmarks/gpu/run.sh --device cpu" in done.stdout
