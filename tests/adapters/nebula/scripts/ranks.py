"""What ranks save; argv: home, mode, the last step, after which step rank 1 falls dead, and how.

"settled" lets everything come home before, "raw" does not.

Prints the tag that was found at the start, and what this rank loads of it.
"""

import json
import os
import signal
import sys

import torch
import torch.distributed as dist

import holdfast.adapters.nebula as nm
from holdfast.errors import InvalidInput

home, mode, last, dies, how = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
nm.init(home)


def state(step, of):
    return {"weights": torch.full((1000,), float(step * 10 + of)), "step": step, "rank": of}


def only_first(step):
    if rank == 0:
        checkpoint = nm.Checkpoint(f"global_step{step}", 2)
        checkpoint.save("model", state(step, 0))
        checkpoint.save("optimizer", state(step, 0))
    dist.barrier()


def all_commit(step):
    """Save like DeepSpeed: rank 0 has one file more."""
    checkpoint = nm.Checkpoint(f"global_step{step}", -2)
    dist.barrier()
    if rank == 0:
        checkpoint.save("model", state(step, 0))
    checkpoint.save(f"zero_{rank}", state(step, rank))
    checkpoint.save("shard", state(step, rank))
    assert checkpoint.commit()


def counted(step):
    """Save one file per rank and change its tensors at once; the last rank completes the tag."""
    value = state(step, rank)
    nm.Checkpoint(f"global_step{step}", world).save("shard", value)
    value["weights"].zero_()
    dist.barrier()


def some(step):
    """Save on the first and last of three ranks."""
    if rank != 1:
        nm.Checkpoint(f"global_step{step}", 2).save("shard", state(step, rank))
    dist.barrier()


def careless(step):
    """Save on every rank without the number of files."""
    try:
        nm.Checkpoint(f"global_step{step}").save("model", state(step, rank))
    except InvalidInput as error:
        print(json.dumps({"refused": str(error)}), flush=True)
    dist.barrier()


latest = nm.get_latest_checkpoint()
start = 0
if latest.tag:
    name = "model" if mode in ("only_first", "careless") else "shard"
    found = latest.load(name)
    start = found["step"]
    assert torch.equal(found["weights"], torch.full((1000,), float(start * 10 + found["rank"])))
    print(json.dumps({"tag": latest.tag, "rank": found["rank"]}), flush=True)
dist.barrier()
for step in range(start + 1, last + 1):
    globals()[mode](step)
    if step == dies and how == "settled":
        dist.barrier()
        nm.flush_persistence()
        dist.barrier()
    if step == dies and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
dist.destroy_process_group()
