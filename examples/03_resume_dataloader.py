"""Resume in the middle of an epoch: data loader, schedule, gradient scaler, averaged weights and all.

pip install scikit-learn
python examples/03_resume_dataloader.py [HOME]
"""

import hashlib
import itertools
import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.train.data import GlobalBatches

home = sys.argv[1] if len(sys.argv) > 1 else "runs/digits"
TOTAL = 150  # steps; an epoch has 29 batches, the last two smaller than 64

pixels, numerals = load_digits(return_X_y=True)  # 1797 pictures of 64 pixels
data = TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(numerals))

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=TOTAL)
scaler = torch.amp.GradScaler("cpu")
averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.98))
# The order is computed from the seed, so a resumed run reads the rest of the epoch, on any number of ranks.
batches = GlobalBatches(len(data), 64, seed=0)
# The loader draws a number whenever it starts, so it has a generator of its own: if it drew from the one that
# dropout uses, a resumed run would see other numbers than one never stopped.
loader = DataLoader(data, batch_sampler=batches, num_workers=1, generator=torch.Generator())
history: list[float] = []

state = {
    "model": model,
    "optimizer": optimizer,
    "scheduler": scheduler,
    "scaler": scaler,
    "averaged": averaged,
    "batches": batches,
    "losses": history,  # plain values are saved too, and restored in place
}
with holdfast.Checkpointer(home, state, every=25) as ckpt:
    stream = itertools.chain.from_iterable(loader for _ in itertools.count())  # epoch after epoch
    for step in ckpt.steps(TOTAL):
        pictures, labels = next(stream)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(pictures), labels)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        averaged.update_parameters(model)
        history.append(loss.item())
        if (step + 1) % 25 == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}, {len(history)} losses kept", flush=True)

averaged.eval()
inputs, targets = data.tensors
right = (averaged(inputs).argmax(1) == targets).float().mean().item()
text = hashlib.sha256(repr(history).encode())
for tensor in (*model.state_dict().values(), *averaged.state_dict().values()):
    text.update(tensor.numpy().tobytes())
print(f"done; {right:.1%} right; sha256 of weights and losses {text.hexdigest()}")
