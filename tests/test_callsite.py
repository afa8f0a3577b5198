"""Warnings point at a line of the script that runs into them."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path

import pytest

from holdfast.system import callsite
from nursery import shared

KEEPER_DIES = """
import os, sys, time
import psutil
import torch
import holdfast

model = torch.nn.Linear(4, 4)

def kill_the_keeper():
    mine = os.environ["HOLDFAST_RUNTIME_DIR"]
    for process in psutil.process_iter(["cmdline", "environ"]):
        if "holdfast.checkpoint.keeper" in (process.info["cmdline"] or []):
            if (process.info["environ"] or {}).get("HOLDFAST_RUNTIME_DIR") == mine:
                process.kill()

home = sys.argv[1]
with holdfast.Checkpointer(home, {"model": model}) as ckpt:
    ckpt.save(1).wait_durable()
    kill_the_keeper()
    while not ckpt._training.attempt.keeper.problems:
        time.sleep(0.01)
    ckpt.save(2)  # <- here
"""
OTHER_GROUPS = """
import sys
import torch
import holdfast

layers = [torch.nn.Linear(2, 2, bias=False) for _ in range(2)]
model = torch.nn.Sequential(*layers)
groups = [{"params": [layer.weight], "lr": 0.1 * (i + 1)} for i, layer in enumerate(layers)]
with holdfast.Checkpointer(sys.argv[1], {"model": model, "optimizer": torch.optim.SGD(groups)}) as ckpt:
    ckpt.save(1)
one = torch.optim.SGD(model.parameters(), lr=0.1)
with holdfast.Checkpointer(sys.argv[1], {"model": model, "optimizer": one}) as ckpt:
"""
RESTORE = "    ckpt.restore()  # <- here\n"
IN_THE_LOOP = "    for step in ckpt.steps(3):  # <- here\n        pass\n"
COMMA = """
import sys
import holdfast.adapters.nebula as nm

nm.init(persistent_storage_path=(sys.argv[1],))  # <- here
"""


@pytest.mark.parametrize(
    "script",
    [KEEPER_DIES, OTHER_GROUPS + RESTORE, OTHER_GROUPS + IN_THE_LOOP, COMMA],
    ids=["keeper dies", "restore", "in the loop", "comma"],
)
def test_a_warning_shows_the_line_of_the_script(script: str, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(script)
    (tmp_path / "runtime").mkdir(mode=0o700)
    done = shared().run(
        ["-W", "always", str(file), str(tmp_path / "home")],
        env={**os.environ, "HOLDFAST_RUNTIME_DIR": str(tmp_path / "runtime")},
    )
    assert done.returncode == 0, done.stderr
    line = next(number for number, text in enumerate(script.splitlines(), 1) if "<- here" in text)
    # At its end torch 2.6 warns of a temporary folder of its own, with a ResourceWarning.
    found = re.findall(r"^(\S+):(\d+): (?!Resource)\w*Warning: ", done.stderr, re.M)
    assert (str(file), str(line)) in found, done.stderr
    assert {path for path, _ in found} == {str(file)}, done.stderr


def test_frames_of_frameworks_are_passed_through() -> None:
    """The optimizer calls a hook of ours; the user's line is the one that calls the optimizer."""
    optimizer = {"__name__": "torch.optim.optimizer"}
    ours = {"__name__": "holdfast.checkpoint.stage.stager", "warn": callsite.warn}
    exec("def hook(): warn('here', UserWarning)", ours)
    exec("def step(hook): hook()", optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer["step"](ours["hook"])  # type: ignore[operator]
    assert [Path(one.filename).name for one in caught] == [Path(__file__).name]
