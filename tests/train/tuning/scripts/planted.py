"""A training with ten faults, each marked on its line."""

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(0)
torch.set_num_threads(1)


class Texts(Dataset):
    def __len__(self):
        return 4000

    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.randint(1, 100, (5 + (index * 7) % 60,))


def collate(rows):  # fault: padding
    out = torch.zeros(len(rows), 128, dtype=torch.long)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(100, 64)
        self.head = nn.Linear(64, 100)
        self.calls = 0

    def forward(self, x):
        self.calls += 1  # fault: recompile
        h = self.embedding(x) * (1 + 1e-9 * self.calls)
        print("forward", end="")  # fault: graph break
        h = self.head(h)
        chosen = h[x > 0]  # fault: graph break
        if chosen.sum() > 1e9:  # fault: graph break
            chosen = chosen * 2
        return chosen


model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(Texts(), batch_size=4, collate_fn=collate)  # fault: input
total, seen = 0.0, []
for step, batch in enumerate(loader):
    logits = model(batch)
    loss = nn.functional.cross_entropy(logits, torch.ones(len(logits), dtype=torch.long))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    total += loss.item()  # fault: sync
    print(loss)  # fault: sync
    seen.append(logits[:8].argmax(-1).tolist())  # fault: sync
    norm = float(model.head.weight.detach().norm())  # fault: sync
    if step % 10 == 0:
        print(step, loss.item())
