"""The training of `planted.py` with all suggestions applied."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from holdfast.train.lengths import BucketBatches

torch.manual_seed(0)
torch.set_num_threads(1)


class Texts(Dataset):
    def __init__(self):
        self.rows = [torch.randint(1, 100, (5 + (index * 7) % 60,)) for index in range(4000)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def collate(rows):
    padded = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return nn.functional.pad(padded, (0, -padded.shape[1] % 8))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(100, 64)
        self.head = nn.Linear(64, 100)

    def forward(self, x):
        return self.head(self.embedding(x))


model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
texts = Texts()
batches = BucketBatches([len(row) for row in texts.rows], 64)
loader = DataLoader(texts, batch_sampler=batches, collate_fn=collate)
total, step = torch.zeros(()), 0
for _ in range(20):
    for batch in loader:
        logits = model(batch)
        each = nn.functional.cross_entropy(logits.transpose(1, 2), torch.ones_like(batch), reduction="none")
        mask = batch > 0
        loss = torch.where(mask, each, 0.0).sum() / mask.sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach()
        step += 1
        if step % 50 == 0:
            print(step, float(total) / 50)
            total.zero_()
