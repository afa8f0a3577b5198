"""The samples of Nebula's documentation in order, with their mistakes; argv: a folder."""

import sys

import torch

import holdfast.adapters.nebula as nm

model = torch.nn.Linear(3, 2)

persistent_storage_path = (sys.argv[1],)
# The documentation's sample has 2 seconds, which a busy machine needs from here to the first save.
nm.init(persistent_storage_path, persistent_time_interval=3600)

checkpoint = nm.Checkpoint("global_step500")
checkpoint.save("<CKPT_NAME>", model)

latest_ckpt = nm.get_latest_checkpoint()
p0 = latest_ckpt.load("<CKPT_NAME>")
again = torch.nn.Linear(3, 2)
again.load_state_dict(p0)
again.load_state_dict(p0.state_dict())
assert torch.equal(again.weight, model.weight)

## List all checkpoints
ckpts = nm.list_checkpoints()
assert list(ckpts) == ["global_step500"], ckpts

## Get Latest checkpoint path
latest_ckpt_path = nm.get_latest_checkpoint_path("<CKPT_NAME>", sys.argv[1])
assert latest_ckpt_path == "", "it is not due in home yet"
nm.flush_persistence()
latest_ckpt_path = nm.get_latest_checkpoint_path("<CKPT_NAME>", sys.argv[1])
assert torch.equal(torch.load(latest_ckpt_path, weights_only=True)["weight"], model.weight)
print("done")
