"""BERT for question answering: the training of SkyPilot's guide, which comes back after preemptions.

    python train.py --output_dir runs/bert-qa

trains a small BERT on questions about Python's own functions, without a network, in a minute or two. Kill it
and start it again. The guide's own training is the same script:

    python train.py --output_dir runs/bert-qa --model_name_or_path bert-base-uncased --dataset_name squad \
        --per_device_train_batch_size 12 --learning_rate 3e-5 --max_seq_length 384 --doc_stride 128
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from models import make
from questions import Question, read_questions
from spans import Features, best_answers, features_of, score
from torch import nn
from transformers import get_scheduler

import holdfast


def arguments() -> argparse.Namespace:
    """The options of the guide's script that are used here have its names."""
    parser = argparse.ArgumentParser(description="Train BERT to answer questions; start it again to go on.")
    parser.add_argument("--output_dir", required=True, help="folder or URL of the run's checkpoints")
    parser.add_argument("--model_name_or_path", default="small", help="small, or a model of the hub's")
    parser.add_argument(
        "--dataset_name", default="pydoc", help="pydoc, squad, or a folder with SQuAD's files"
    )
    parser.add_argument("--cache_dir", type=Path, default=Path("~/.cache/holdfast-examples").expanduser())
    parser.add_argument("--per_device_train_batch_size", type=int, default=16)
    parser.add_argument("--learning_rate", type=float, default=2e-3)
    parser.add_argument("--num_train_epochs", type=float, default=3)
    parser.add_argument("--max_steps", type=int, help="train so many steps, whatever that is in epochs")
    parser.add_argument("--max_seq_length", type=int, default=128)
    parser.add_argument("--doc_stride", type=int, default=32)
    parser.add_argument("--save_steps", type=int, default=100)
    parser.add_argument("--save_total_limit", type=int, default=3)
    parser.add_argument("--num_eval", type=int, help="ask only the first so many questions at the end")
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


class Batches:
    """The batch of a step follows from the step alone, so that nothing has to be saved to go on with it."""

    def __init__(self, features: Features, size: int, seed: int) -> None:
        self.features, self.size, self.seed = features, size, seed
        self.per_epoch = max(1, len(features) // size)
        self._order = lru_cache(maxsize=1)(self._shuffled)

    def _shuffled(self, epoch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed + epoch)
        return torch.randperm(len(self.features), generator=generator)

    def of(self, step: int) -> dict[str, torch.Tensor]:
        """What the model is given after `step` completed steps."""
        epoch, number = divmod(step, self.per_epoch)
        chosen = self._order(epoch)[number * self.size : (number + 1) * self.size]
        positions = {
            "start_positions": self.features.starts[chosen],
            "end_positions": self.features.ends[chosen],
        }
        return {**shorten({name: one[chosen] for name, one in self.features.inputs.items()}), **positions}


def shorten(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without columns that are nothing but padding."""
    longest = int(inputs["attention_mask"].sum(1).max())
    return {name: one[:, :longest] for name, one in inputs.items()}


def make_optimizer(model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """AdamW without decay."""
    return torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)


def main() -> None:
    """Train, wherever the run stopped, then ask what was held out."""
    args = arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    train, final = read_questions(args.dataset_name, args.cache_dir)
    texts = (text for one in train for text in (one.text, one.context))
    model, tokenizer = make(args.model_name_or_path, texts, length=args.max_seq_length)
    model.to(device)
    sizes = {"length": args.max_seq_length, "stride": args.doc_stride}
    batches = Batches(features_of(train, tokenizer, **sizes), args.per_device_train_batch_size, args.seed)
    total = args.max_steps or round(args.num_train_epochs * batches.per_epoch)
    optimizer = make_optimizer(model, args.learning_rate)
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=total // 20, num_training_steps=total)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    every, keep = args.save_steps, args.save_total_limit
    with holdfast.Checkpointer(args.output_dir, state, every=every, keep=keep) as ckpt:
        model.train()
        for step in ckpt.steps(total):
            batch = {name: one.to(device) for name, one in batches.of(step).items()}
            loss = model(**batch).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            ckpt.record(loss=loss, lr=scheduler.get_last_lr()[0])
            scheduler.step()
            if (step + 1) % 50 == 0:
                print(f"step {step + 1} of {total}: loss {loss.item():.3f}", flush=True)
        asked = final[: args.num_eval]
        result = evaluate(model, asked, features_of(asked, tokenizer, **sizes), device)
        ckpt.record(total, **result)
    print(json.dumps({"step": total, "questions": len(asked), **result}))


@torch.no_grad()
def evaluate(
    model: nn.Module, questions: list[Question], features: Features, device: torch.device
) -> dict[str, float]:
    """How well the model answers questions that it was not trained with."""
    model.eval()
    starts, ends = [], []
    for inputs in _in_parts(features.inputs, 64):
        said = model(**{name: one.to(device) for name, one in inputs.items()})
        starts.append(said.start_logits.float().cpu())
        ends.append(said.end_logits.float().cpu())
    return score(questions, best_answers(questions, features, torch.cat(starts), torch.cat(ends)))


def _in_parts(inputs: dict[str, torch.Tensor], size: int) -> Iterator[dict[str, torch.Tensor]]:
    for first in range(0, len(inputs["input_ids"]), size):
        yield {name: one[first : first + size] for name, one in inputs.items()}


if __name__ == "__main__":
    main()
