"""Time that saves take from a training by Hugging Face's Trainer, stock and attached, in one process.

python -m benchmarks.trainer [--layers 6] [--width 768] [--saves 6]

Both train the same model from the same seed, in turns. Blocked is the time in `_save_checkpoint`, and for
Holdfast also the time for which the optimizer waited for the copy. Needs the extra `transformers`.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from holdfast.adapters.transformers import attach


class Rows(torch.utils.data.Dataset[dict[str, Any]]):
    """Rows of random tokens."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = torch.randint(0, 1000, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": row, "labels": row}


class Timed(Trainer):
    """Trainer that measures its saves, whatever makes them."""

    blocked_s: list[float]

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        began = time.perf_counter()
        super()._save_checkpoint(model, trial)
        self.blocked_s.append(time.perf_counter() - began)


def run(args: argparse.Namespace, folder: Path, *, attached: bool) -> tuple[list[float], float]:
    """Train once; return the blocked seconds of each save, and those that the optimizer waited in all."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "n_embd": args.width,
        "n_layer": args.layers,
        "n_head": 12,
        "vocab_size": 1000,
        "n_positions": 16,
    }
    model = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=1, eos_token_id=1))
    arguments = TrainingArguments(
        str(folder),
        max_steps=args.saves * args.every,
        save_steps=args.every,
        save_total_limit=2,
        per_device_train_batch_size=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Timed(model, arguments, train_dataset=Rows())
    trainer.blocked_s = []
    waited: list[float] = []
    if attached:
        attach(trainer, folders=False, quiet=True)
        trainer.add_callback(_waits(waited, trainer))
    trainer.train()
    return trainer.blocked_s, waited[-1] if waited else 0.0


def _waits(waited: list[float], trainer: Any) -> Any:
    from transformers import TrainerCallback

    class Waits(TrainerCallback):
        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            waited.append(trainer.holdfast_session.waited_for_copy_s)

    return Waits()


def main() -> None:
    """Measure both in turns, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--saves", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None)
    args = parser.parse_args()
    found: dict[bool, list[float]] = {False: [], True: []}
    waits: list[float] = []
    for _ in range(args.rounds):
        for attached in (False, True):
            folder = Path(tempfile.mkdtemp(dir=args.folder))
            blocked_s, waited_s = run(args, folder, attached=attached)
            found[attached] += blocked_s[1:]  # the first one prepares memory, files and processes
            if attached:
                waits.append(waited_s / len(blocked_s))
            shutil.rmtree(folder)
    for attached, name in ((False, "stock"), (True, "holdfast")):
        values = sorted(1000 * one for one in found[attached])
        median = statistics.median(values)
        print(f"{name:9} median {median:8.1f} ms   worst {values[-1]:8.1f} ms   of {len(values)} saves")
    print(f"holdfast  optimizer waited {1000 * statistics.mean(waits):.1f} ms per save for the copy")


if __name__ == "__main__":
    main()
