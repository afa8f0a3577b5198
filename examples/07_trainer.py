"""Hugging Face's Trainer, with one line added. Run it, kill it whenever you like, run it again.

python examples/07_trainer.py [OUTPUT_DIR]
"""

import hashlib
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from holdfast.adapters.transformers import attach

output_dir = sys.argv[1] if len(sys.argv) > 1 else "runs/trainer"


class Counting(torch.utils.data.Dataset):
    """Rows of numbers that count up by one or two."""

    def __len__(self):
        return 512

    def __getitem__(self, index):
        row = (index + torch.arange(32) * (1 + index % 2)) % 100
        return {"input_ids": row, "labels": row}


torch.manual_seed(0)
config = GPT2Config(
    vocab_size=100, n_positions=32, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
)
model = GPT2LMHeadModel(config)
arguments = TrainingArguments(
    output_dir, max_steps=200, save_steps=20, save_total_limit=2, logging_steps=20, report_to=[], use_cpu=True
)
trainer = Trainer(model, arguments, train_dataset=Counting())

attach(trainer)  # the one line; everything else is as without it
trainer.train(resume_from_checkpoint="auto")  # as True, and a new run where there is none

weights = torch.cat([weight.detach().flatten() for weight in model.parameters()])
print(f"done; the weights' sha256 is {hashlib.sha256(weights.numpy().tobytes()).hexdigest()}")
