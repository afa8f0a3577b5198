"""A loop with Hugging Face Accelerate, with one line added. Run it, kill it whenever you like, run it again.

python examples/08_accelerate.py [PROJECT_DIR]
"""

import hashlib
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed

from holdfast.adapters.accelerate import attach, is_preempted

project_dir = sys.argv[1] if len(sys.argv) > 1 else "runs/accelerate"


class Progress:
    """Position of the loop, registered as Accelerate's guide on checkpoints shows it."""

    def __init__(self):
        self.epoch = self.step = 0

    def state_dict(self):
        return vars(self)

    def load_state_dict(self, state):
        vars(self).update(state)


config = ProjectConfiguration(project_dir, automatic_checkpoint_naming=True, total_limit=3)
accelerator = Accelerator(cpu=True, project_config=config)
attach(accelerator)  # the one line; everything else is as without it

set_seed(0)
x = torch.randn(512, 16)
rows = torch.utils.data.TensorDataset(x, x.square().sum(1, keepdim=True))
loader = torch.utils.data.DataLoader(rows, batch_size=16, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
progress = Progress()
accelerator.register_for_checkpointing(progress)

if list(Path(project_dir, "checkpoints").glob("checkpoint_*")):  # after attach(), all of them are complete
    accelerator.load_state()

while progress.epoch < 5:
    batches = accelerator.skip_first_batches(loader, progress.step) if progress.step else loader
    for inputs, targets in batches:
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        progress.step += 1
        if progress.step % 10 == 0 or is_preempted(accelerator):
            accelerator.save_state()
    progress.epoch, progress.step = progress.epoch + 1, 0

weights = torch.cat([weight.detach().flatten() for weight in model.parameters()])
print(f"done; the weights' sha256 is {hashlib.sha256(weights.numpy().tobytes()).hexdigest()}")
accelerator.end_training()
