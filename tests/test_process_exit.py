"""Leaving a process: output is flushed, the status is kept, the process group is gone."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

import holdfast
from nursery import shared
from stage.training import wait_until

GLOO = """
import torch.distributed as dist, tempfile
dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
dist.barrier()
"""


@pytest.mark.parametrize("status", [0, 75])
@pytest.mark.parametrize("setup", ["", GLOO], ids=["alone", "gloo"])
def test_hard_exit_ends_with_the_status_and_all_output(status: int, setup: str) -> None:
    end = f"sys.stdout.write('said'); holdfast.hard_exit({status}); print('never')"
    program = f"import sys, holdfast\n{setup}\n{end}"
    done = shared().run(["-c", program])
    assert (done.returncode, done.stdout) == (status, "said"), done.stderr


UNCLOSED = """
import os, signal, sys, torch, holdfast
model = torch.nn.Linear(1500, 1500)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
ckpt = holdfast.Checkpointer(sys.argv[1], {"model": model, "optimizer": optimizer}, every=10**9)
ckpt.restore()
ckpt.save(1).wait_durable()
keeper = ckpt._training.attempt.keeper.pid
"""
SAVE = """
os.kill(keeper, signal.SIGSTOP)  # so that the save cannot be durable before the end
print(keeper, flush=True)
ckpt.save(2)
"""


@pytest.mark.parametrize(
    ("end", "status"), [("", 0), ("sys.exit(3)", 3), ("raise KeyError('x')", 1), ("holdfast.hard_exit(4)", 4)]
)
def test_a_program_that_ends_without_close_keeps_its_last_save(tmp_path: Path, end: str, status: int) -> None:
    done = shared().run(["-c", UNCLOSED + SAVE + end, str(tmp_path / "home")])
    assert done.returncode == status, done.stderr
    _check_kept(done, tmp_path / "home")


def _check_kept(done: subprocess.CompletedProcess[str], home: Path) -> None:
    os.kill(int(done.stdout), signal.SIGCONT)
    assert done.stderr.count("The program ends without close()") == 1
    assert "step 2 is not durable yet" in done.stderr
    wait_until(lambda: holdfast.open(home).step == 2)


def test_all_threads_have_ended_when_a_program_without_close_does(tmp_path: Path) -> None:
    look = """
import threading
from holdfast.system import process_exit
ckpt.save(2).wait_durable()
ckpt.wait()
process_exit._complete_all()
print([one.name for one in threading.enumerate() if one.name.startswith("holdfast")])
"""
    done = shared().run(["-c", UNCLOSED + look, str(tmp_path / "home")])
    assert done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr
    assert "without close()" not in done.stderr, "everything was durable"


@pytest.mark.parametrize("end", ["", "sys.exit(3)"])
def test_a_child_that_multiprocessing_has_forked_keeps_its_last_save(tmp_path: Path, end: str) -> None:
    train = (UNCLOSED + SAVE + end).replace("\n", "\n    ")
    program = f"""
import multiprocessing, os, signal, sys, torch, holdfast
def train():
    {train}
holdfast.Checkpointer  # imported before the fork
child = multiprocessing.get_context("fork").Process(target=train)
child.start()
child.join()
sys.exit(child.exitcode)
"""
    done = shared().run(["-c", program, str(tmp_path / "home")])
    assert done.returncode == (3 if end else 0), done.stderr
    _check_kept(done, tmp_path / "home")
