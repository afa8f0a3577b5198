"""Closed terminals: the training in one is saved and ends, unless it ignores that, as under nohup."""

from __future__ import annotations

import os
import pty
import sys
from pathlib import Path

import pytest

import holdfast
from holdfast.errors import PREEMPTED_STATUS
from nursery import shared
from stage.training import wait_until

AT, TOTAL = 3, 60
TRAIN = f"""
import os, signal, sys, time
from pathlib import Path
import torch, holdfast

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4000
    def __getitem__(self, index):
        return torch.ones(4)

if len(sys.argv) > 1:  # a session leader gets its terminal by opening it
    terminal = os.open(sys.argv[1], os.O_RDWR)
    os.dup2(terminal, 1)
    os.dup2(terminal, 2)
    os.close(terminal)
    if sys.argv[2] == "ignored":
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if sys.argv[2] == "own":
        signal.signal(signal.SIGHUP, lambda number, frame: None)
is_ignored = signal.getsignal(signal.SIGHUP) != signal.SIG_DFL

def train():
    state = {{"seen": 0}}
    with holdfast.Checkpointer("home", state, every=10**9) as ckpt:
        batches = iter(torch.utils.data.DataLoader(Data(), 4, num_workers=1))
        for step in ckpt.steps({TOTAL}):
            next(batches)
            if step == {AT}:
                print("ready", flush=True)
                stop_reason = ckpt._training._watching.stop_reason
                while not Path("closed").exists() or not (is_ignored or stop_reason()):
                    time.sleep(0.01)
            next(batches)
            state["seen"] = step + 1
            if not is_ignored:
                print("step", step, flush=True)
                print("step", step, file=sys.stderr)

try:
    train()
except SystemExit as end:
    Path("status").write_text(str(end.code))
    raise
Path("status").write_text("0")
"""


def ready(master: int) -> bytes:
    """Read from a terminal until the training is in the step that the terminal is closed in."""
    text = b""
    while b"ready\r" not in text:
        text += os.read(master, 4096)
    return text


def check_end(folder: Path, status: int, step: int) -> None:
    """Wait for the status of a training, and check that it and the newest step are the expected ones."""
    path = folder / "status"
    wait_until(lambda: path.exists() and path.read_text())
    assert int(path.read_text()) == status
    assert holdfast.open(folder / "home").step == step


@pytest.mark.parametrize(
    ("way", "status", "step"),
    [("default", PREEMPTED_STATUS, AT + 1), ("ignored", 0, TOTAL), ("own", 0, TOTAL)],
)
def test_a_closed_terminal_ends_a_training_with_a_save(
    tmp_path: Path, way: str, status: int, step: int
) -> None:
    """Even if it prints in the step that is saved. A handler of the user's own decides otherwise."""
    (tmp_path / "train.py").write_text(TRAIN)
    master, slave = pty.openpty()
    child = shared().start(["train.py", os.ttyname(slave), way], tmp_path / "output.txt", cwd=tmp_path)
    ready(master)
    os.close(slave)
    os.close(master)
    (tmp_path / "closed").touch()
    assert child.wait() == status, child.said()
    check_end(tmp_path, status, step)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "status", "step"),
    [
        ("{python} train.py", PREEMPTED_STATUS, AT + 1),
        ("{python} train.py & wait", PREEMPTED_STATUS, AT + 1),
        ("nohup {python} train.py | cat & wait", 0, TOTAL),
    ],
)
def test_a_shell_of_a_closed_terminal_signals_all_processes_of_the_training(
    tmp_path: Path, command: str, status: int, step: int
) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    pid, master = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execvp("bash", ["bash", "--norc", "-i"])
    os.write(master, f"{command.format(python=sys.executable)}\n".encode())
    ready(master)
    os.close(master)
    (tmp_path / "closed").touch()
    check_end(tmp_path, status, step)
    os.waitpid(pid, 0)
