"""Loops that a trainer owns: it continues from a verified checkpoint, and stops after a notice."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast import Preemption
from nursery import shared
from stage.training import wait_until


def save(home: Path, *steps: int) -> None:
    with holdfast.Checkpointer(home, keep=None, quiet=True) as ckpt:
        ckpt.continue_from()
        for step in steps:
            ckpt.save(step, {"model": torch.full((1000,), float(step)), "optimizer": torch.ones(1000)})


def damage(home: Path, step: int) -> None:
    """Flip a bit in the tensor `optimizer`."""
    (data,) = (home / f"step-{step:08d}").glob("*.safetensors")
    raw = bytearray(data.read_bytes())
    raw[raw.index(torch.ones(1000).numpy().tobytes())] ^= 1
    data.write_bytes(raw)


def test_a_verified_continuation_skips_damage_in_what_is_not_loaded(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    damage(tmp_path, 2)
    with holdfast.Checkpointer(tmp_path, keep=None, quiet=True) as ckpt:
        assert ckpt.continue_from() == 2  # its documents are whole
    with holdfast.Checkpointer(tmp_path, keep=None, quiet=True) as ckpt:
        assert ckpt.continue_from(verify=True) == 1
        assert ckpt.restored_step == 1
        with pytest.raises(holdfast.Corrupt):
            ckpt.continue_from(2, verify=True)


def test_stop_ends_a_preempted_loop_with_75_once_its_save_is_durable(tmp_path: Path) -> None:
    state = {"model": torch.nn.Linear(2, 2)}
    ckpt = holdfast.Checkpointer(tmp_path, state, every=10**9, quiet=True, watches=[Preemption("none")])
    ckpt.should_save(1)
    os.kill(os.getpid(), signal.SIGUSR1)
    wait_until(lambda: ckpt.should_save(2) or ckpt.preempted is not None)
    with pytest.raises(holdfast.Preempted) as stopped:
        ckpt.stop(2)
    assert stopped.value.code == 75
    assert holdfast.open(tmp_path).step == 2


LOOPS = """
import os, signal, sys, torch, holdfast
home, loop, moment = sys.argv[1:]
x = torch.zeros(100_000)
ckpt = holdfast.Checkpointer(home, {"x": x}, every=1, quiet=True)

def train(step):
    print(step, flush=True)
    x.add_(1)

if loop == "steps":
    for step in ckpt.steps(4):
        train(step)
else:
    for step in range(ckpt.restore() or 0, 4):
        train(step)
        if loop == "save" or ckpt.should_save(step + 1):
            ckpt.save(step + 1)
if moment == "staged" and loop == "save":
    ckpt.save(4).wait_staged()
elif moment != "never":
    ckpt.wait()
if moment != "never":
    os.kill(os.getpid(), signal.SIGKILL)
assert x[0] == 4, x
ckpt.finish(4)
ckpt.close()
"""


@pytest.mark.parametrize(
    ("loop", "moment"),
    [("steps", "durable"), ("should_save", "durable"), ("save", "durable"), ("save", "staged")],
)
def test_a_run_killed_after_its_last_save_trains_no_further_step(
    tmp_path: Path, loop: str, moment: str
) -> None:
    """The edge between the last step and the end of the run, of which no loop may be wrong by one."""
    words = ["-c", LOOPS, str(tmp_path / "home"), loop]
    killed = shared().run([*words, moment])
    assert (killed.returncode, killed.stdout.split()) == (-signal.SIGKILL, list("0123")), killed.stderr
    for _ in range(2):  # the start after the kill, and one after the end
        resumed = shared().run([*words, "never"])
        assert (resumed.returncode, resumed.stdout) == (0, ""), resumed.stderr
    assert holdfast.open(tmp_path / "home").step == 4
