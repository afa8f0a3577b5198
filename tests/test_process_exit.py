"""Leaving a process: output is flushed, the status is kept, the process group is gone."""

from __future__ import annotations

import pytest

from nursery import shared

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
