"""Time that saves take from a Lightning training: ModelCheckpoint, AsyncCheckpointIO, HoldfastCheckpoint.

Each method trains the same model in a process of its own and saves after some batches. The rounds alternate.
Needs `pip install 'torch-holdfast[lightning]'`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

METHODS = ("stock", "async", "holdfast")
TITLES = {
    "stock": "ModelCheckpoint",
    "async": "ModelCheckpoint with AsyncCheckpointIO",
    "holdfast": "HoldfastCheckpoint",
}


def train(method: str, folder: Path, options: argparse.Namespace) -> list[float]:
    """Train, and return the seconds of each call of `Trainer.save_checkpoint`."""
    import torch
    from lightning.pytorch import LightningModule, Trainer  # pyright: ignore[reportMissingImports]
    from lightning.pytorch.callbacks import ModelCheckpoint  # pyright: ignore[reportMissingImports]
    from lightning.pytorch.plugins.io import AsyncCheckpointIO  # pyright: ignore[reportMissingImports]

    from holdfast.adapters.lightning import HoldfastCheckpoint

    class Wide(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(options.layers)))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layers(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    seconds: list[float] = []

    class Timed(Trainer):
        def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            began = time.perf_counter()
            super().save_checkpoint(*args, **kwargs)
            seconds.append(time.perf_counter() - began)

    kind = HoldfastCheckpoint if method == "holdfast" else ModelCheckpoint
    trainer = Timed(
        max_epochs=1,
        limit_train_batches=options.saves * options.every,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        plugins=[AsyncCheckpointIO()] if method == "async" else [],
        callbacks=[kind(dirpath=folder / "ckpt", every_n_train_steps=options.every)],
    )
    trainer.fit(Wide(), torch.utils.data.DataLoader(torch.randn(4096, 1024), batch_size=32))  # type: ignore[arg-type]
    return seconds


def main() -> None:
    """Measure all methods, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=24, help="of 12.6 MB with their optimizer state")
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--every", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path, default=Path())
    parser.add_argument("--child", choices=METHODS)
    options = parser.parse_args()
    if options.child is not None:
        print("SECONDS", json.dumps(train(options.child, options.dir, options)))
        return
    found: dict[str, list[float]] = {method: [] for method in METHODS}
    for turn in range(options.rounds):
        for method in (*METHODS[turn % 3 :], *METHODS[: turn % 3]):
            found[method] += measure(method, options)
    size = options.layers * 1024 * 1025 * 4 * 3 / 1e6
    print(f"state of {size:.0f} MB; {options.rounds} rounds of {options.saves} saves, without the first")
    print("| method | blocked, median | longest |\n|---|---|---|")
    for method, values in found.items():
        median, longest = statistics.median(values) * 1e3, max(values) * 1e3
        print(f"| {TITLES[method]} | {median:.0f} ms | {longest:.0f} ms |")


def measure(method: str, options: argparse.Namespace) -> list[float]:
    """Return the seconds of the saves of one process, without the first."""
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        sizes = [f"--{name}={getattr(options, name)}" for name in ("layers", "saves", "every")]
        command = [sys.executable, __file__, f"--child={method}", f"--dir={folder}", *sizes]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("SECONDS")]
    if not lines:
        raise SystemExit(done.stderr)
    return json.loads(lines[0].removeprefix("SECONDS"))[1:]


if __name__ == "__main__":
    main()
