"""A training without faults."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(0)
torch.set_num_threads(1)


class Points(Dataset):
    def __init__(self):
        self.x = torch.randn(20000, 64)
        self.y = self.x[:, :10].argmax(1)

    def __len__(self):
        return len(self.x)

    def __getitems__(self, indices):
        return self.x[indices], self.y[indices]


model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = DataLoader(Points(), batch_size=512, collate_fn=lambda pair: pair, shuffle=True, drop_last=True)
total = torch.zeros(())
step = 0
for _ in range(20):
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        total += loss.detach()
        step += 1
        if step % 20 == 0:
            print(step, float(total) / 20)
            total.zero_()
print("done", step)
