"""Resume in the middle of an epoch: data loader, schedule, gradient scaler, averaged weights and all.

pip install torchdata scikit-learn
python examples/03_resume_dataloader.py [HOME]
"""

import hashlib
import sys
from collections.abc import Iterator

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler

import holdfast

home = sys.argv[1] if len(sys.argv) > 1 else "runs/digits"
TOTAL = 150  # steps; an epoch has 29 batches of 64

pixels, numerals = load_digits(return_X_y=True)  # 1797 pictures of 64 pixels
data = TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(numerals))

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=TOTAL)
scaler = torch.amp.GradScaler("cpu")
averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.98))
# The loader draws a number whenever it starts, so it has a generator of its own: if it drew from the one that
# dropout uses, or from the sampler's, a resumed run would see other numbers than one never stopped.
sampler = RandomSampler(data, generator=torch.Generator().manual_seed(0))
loader = StatefulDataLoader(data, batch_size=64, sampler=sampler, generator=torch.Generator())
history: list[float] = []


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Batches for ever, epoch after epoch; a restored loader continues in the middle of one."""
    while True:
        yield from loader


state = {
    "model": model,
    "optimizer": optimizer,
    "scheduler": scheduler,
    "scaler": scaler,
    "averaged": averaged,
    "loader": loader,
    "losses": history,  # plain values are saved too, and restored in place
}
with holdfast.Checkpointer(home, state, every=25) as ckpt:
    stream = batches()  # asks the loader at its first batch, which is after the restore
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
