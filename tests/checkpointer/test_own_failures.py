"""`every="auto"` of a run that was killed some times."""

from __future__ import annotations

from pathlib import Path

import pytest

import nursery
from holdfast.checkpoint.home.history import read_lines
from holdfast.checkpoint.store import open_store

PROGRAM = """
import os, signal, sys
import torch
import holdfast

kill_after, home = int(sys.argv[1]), sys.argv[2]
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
state = {"model": model, "optimizer": optimizer}
every = holdfast.EveryAuto(first_steps=2)
with holdfast.Checkpointer(home, state, every=every, quiet=True) as ckpt:
    saved = 0
    for step in ckpt.steps(10**6):
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        ckpt.record(loss=1.0)
        if ckpt.latest_step() is not None and step > kill_after:
            ckpt.wait()
            if kill_after:
                os.kill(os.getpid(), signal.SIGKILL)
            break
"""


@pytest.mark.slow
def test_after_three_failures_they_are_part_of_the_choice_and_in_the_history(tmp_path: Path) -> None:
    program, home = tmp_path / "train.py", tmp_path / "home"
    program.write_text(PROGRAM)

    def run(name: str, kill_after: int) -> int:
        arguments = [str(program), str(kill_after), str(home)]
        return nursery.shared().start(arguments, tmp_path / name).wait()

    for number in range(3):
        assert run(f"killed-{number}", 100 * (number + 1)) == -9
    assert run("last", 0) == 0
    choices = {
        line["attempt"]: line["detail"]
        for line in read_lines(open_store(home))[0]
        if line["event"] == "interval"
    }
    assert "failures" not in choices[1]
    assert "3 failures in" in choices[4]
