"""Trains with DeepSpeed and its "nebula" block; argv: home, DeepSpeed's folder, last step, when to fall dead.

Prints where it began and the sum of the weights.
"""

# Pyright takes the folder tests/adapters/deepspeed for the package.
# pyright: reportAttributeAccessIssue=false

import os
import signal
import sys

import deepspeed
import torch

import holdfast.adapters.nebula as nm

home, folder, last, dies = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
nm.use_for_deepspeed()
deepspeed.ops.__compatible_ops__.clear()  # else it compiles its own all-reduce first
deepspeed.init_distributed("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
config = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
    "zero_optimization": {"stage": int(os.environ["ZERO_STAGE"])},
    "nebula": {
        "enabled": True,
        "persistent_storage_path": home,
        "persistent_time_interval": 3600,
        "num_of_version_in_retention": 2,
        "enable_nebula_load": True,
    },
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
path, client = engine.load_checkpoint(folder)
start = client["step"] if path is not None else 0
print("start", start, flush=True)
for step in range(start + 1, last + 1):
    torch.manual_seed(step * 10 + engine.global_rank)
    loss = engine(torch.randn(4, 8)).square().mean()
    engine.backward(loss)
    engine.step()
    engine.save_checkpoint(folder, client_state={"step": step})
    if step == dies:
        torch.distributed.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
print("weights", float(sum(p.detach().double().sum() for p in engine.module.parameters())).hex(), flush=True)
engine.save_16bit_model(folder)
