"""A training whose compiled model is slower on a CPU: small layers with dropout."""

import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 64)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        x = x.repeat(512, 1)
        for _ in range(4):
            x = self.dropout(x)
        print("forward")  # fault: graph break
        return self.head(x)


net = Net()
model = torch.compile(net)  # fault: compile
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(200):
    loss = model(torch.randn(64, 64)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
