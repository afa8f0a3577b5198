"""A loop with DeepSpeed, with one line added. Run it, kill it whenever you like, run it again.

DS_BUILD_OPS=0 pip install 'torch-holdfast[deepspeed]'
python examples/09_deepspeed.py [FOLDER]
"""

import hashlib
import os
import sys

import deepspeed  # pyright: ignore[reportMissingImports] - an extra
import torch

from holdfast.adapters.deepspeed import attach

folder = sys.argv[1] if len(sys.argv) > 1 else "runs/deepspeed"

for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
    os.environ.setdefault(name, value)  # one process; the launchers set other values
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29500")
deepspeed.ops.__compatible_ops__.pop(
    "deepspeed_shm_comm", None
)  # on CPUs: do not compile an all-reduce first

config = {
    "train_micro_batch_size_per_gpu": 16,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
}
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1))
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
attach(engine, keep=3)  # the one line; everything else is as without it

torch.manual_seed(engine.global_rank)  # the batches of this rank; a load restores their place, too
path, client_state = engine.load_checkpoint(folder)  # also at the first start, which finds nothing
step = client_state["step"] if path else 0

while step < 200:
    inputs = torch.randn(16, 16, device=engine.device, dtype=torch.bfloat16)
    loss = torch.nn.functional.mse_loss(engine(inputs), inputs.square().sum(1, keepdim=True))
    engine.backward(loss)
    engine.step()
    step += 1
    if step % 20 == 0:
        engine.save_checkpoint(folder, client_state={"step": step})

weights = torch.cat([weight.detach().float().flatten() for weight in engine.module.parameters()])
print(f"done; the weights' sha256 is {hashlib.sha256(weights.cpu().numpy().tobytes()).hexdigest()}")
