"""The first FSDP tutorial as one run: a conv net on digits, spread over the ranks in four ways, and compared.

torchrun --standalone --nproc-per-node 2 examples/mnist_fsdp/train.py [--home DIR] [--epochs N]
holdfast launch examples/mnist_fsdp/task.yaml

Kill it whenever you like and start it again, on as many ranks as you like: each way resumes where it stopped.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from digits import Digits, load
from memory import peak_of
from table import write
from torch import nn
from torch.nn import functional

import holdfast

WAYS: dict[str, dict[str, Any]] = {
    "ddp": {"shards": 1, "wrap": []},
    "fsdp": {"wrap": []},  # the whole net is one unit, as in the tutorial's first try
    "fsdp-wrapped": {"wrap": 20_000},  # its size_based_auto_wrap_policy(min_num_params=20000)
    "fsdp-offloaded": {"wrap": 20_000, "cpu_offload": True},
}


class Net(nn.Module):
    """The tutorial's network, for images of any size."""

    def __init__(self, side: int, dropout: bool = True) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3, 1), nn.Conv2d(32, 64, 3, 1)
        self.dropout1, self.dropout2 = nn.Dropout(0.25 * dropout), nn.Dropout(0.5 * dropout)
        self.fc1, self.fc2 = nn.Linear(64 * ((side - 4) // 2) ** 2, 128), nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 1, side, side) -> (batch, 10) log probabilities."""
        x = functional.max_pool2d(self.conv2(self.conv1(x).relu()).relu(), 2)
        x = self.fc1(self.dropout1(x).flatten(1)).relu()
        return functional.log_softmax(self.fc2(self.dropout2(x)), dim=1)


def main() -> None:
    """Train in every way, one after the other, and compare."""
    args = read_arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group()
    if args.batch % num_ranks():
        sys.exit(f"a batch of {args.batch} cannot be divided evenly among {num_ranks()} ranks")
    data = load(args.data, args.folder, args.side)
    try:
        rows = [train(way, data, args, device) for way in args.ways]
        if rank() == 0:
            write(rows, args.home)
    except holdfast.Preempted as notice:  # what was learned is durable; the next start resumes
        holdfast.hard_exit(notice.code)
    holdfast.hard_exit(0)  # a finished gloo process may otherwise be aborted by its own threads


def train(way: str, data: Digits, args: argparse.Namespace, device: str) -> dict[str, Any]:
    """Train one way to its end, from where it stopped; returns a row of the table."""
    peak_bytes = peak_of(lambda: rehearse(way, data, args, device), device)
    model, optimizer = build(way, data, args, quiet=False)
    per_epoch = len(data.train) // args.batch
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=per_epoch, gamma=args.gamma)
    torch.manual_seed(
        args.seed + 1 + rank()
    )  # each rank has dropout of its own; Holdfast keeps its generator
    curve = torch.zeros(args.epochs * per_epoch, device=device)  # the loss of every step, of all ranks
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    state |= {"curve": holdfast.replicated(curve), "seconds": 0.0}
    with holdfast.Checkpointer(args.home / way, state, every=args.every, memory="256MiB") as ckpt:
        started = time.perf_counter()
        for step in ckpt.steps(len(curve)):
            epoch, batch = divmod(step, per_epoch)
            images, targets = data.batch(epoch, batch, args, rank(), num_ranks(), device)
            optimizer.zero_grad()
            loss = functional.nll_loss(model(images), targets)
            loss.backward()
            optimizer.step()
            scheduler.step()
            curve[step] = mean(loss)
            state["seconds"] += time.perf_counter() - started
            started = time.perf_counter()
            if batch == per_epoch - 1 and rank() == 0:
                print(
                    f"{way}: epoch {epoch + 1}, loss {curve[step - batch : step + 1].mean():.4f}", flush=True
                )
    test_loss, accuracy = evaluate(model, data, device)
    kept_bytes = holdfast.describe(model).local_bytes
    row = {"way": way, "ranks": num_ranks(), "seconds": state["seconds"], "loss": test_loss}
    row |= {"accuracy": accuracy, "curve": curve.tolist()}
    return row | {"peak_bytes": gather(peak_bytes), "kept_bytes": gather(kept_bytes)}


def build(
    way: str, data: Digits, args: argparse.Namespace, *, quiet: bool
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The net, spread over the ranks, and its optimizer, which is made after that."""
    torch.manual_seed(args.seed)  # every rank draws the same weights, and keeps its part
    model = holdfast.shard(Net(data.side, not args.no_dropout), **WAYS[way], quiet=quiet)
    return model, torch.optim.Adadelta(model.parameters(), lr=args.lr)


def rehearse(way: str, data: Digits, args: argparse.Namespace, device: str) -> None:
    """Two steps whose memory is measured: the second one has the optimizer's state already."""
    model, optimizer = build(way, data, args, quiet=True)
    for batch in range(2):
        images, targets = data.batch(0, batch, args, rank(), num_ranks(), device)
        optimizer.zero_grad()
        functional.nll_loss(model(images), targets).backward()
        optimizer.step()


@torch.no_grad()
def evaluate(model: nn.Module, data: Digits, device: str) -> tuple[float, float]:
    """(loss, accuracy) on the test images; every one counts once, however many ranks there are."""
    model.eval()
    images, targets = data.test.take(torch.arange(rank(), len(data.test), num_ranks()), device)
    output = model(images)
    right = (output.argmax(1) == targets).sum().float()
    sums = torch.stack([functional.nll_loss(output, targets, reduction="sum"), right])
    if num_ranks() > 1:
        dist.all_reduce(sums)
    loss, accuracy = (sums / len(data.test)).tolist()
    return loss, accuracy


def rank() -> int:
    """This process's number."""
    return dist.get_rank() if dist.is_initialized() else 0


def num_ranks() -> int:
    """How many train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def mean(loss: torch.Tensor) -> torch.Tensor:
    """The loss of the whole batch."""
    total = loss.detach().clone()
    if num_ranks() > 1:
        dist.all_reduce(total)
    return total / num_ranks()


def gather(value: int) -> list[int]:
    """Every rank's value."""
    values: list[Any] = [value] * num_ranks()
    if num_ranks() > 1:
        dist.all_gather_object(values, value)
    return values


def read_arguments() -> argparse.Namespace:
    """What the caller wants."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--home", type=Path, default=Path("runs/mnist"), help="checkpoints, one run for each way"
    )
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--data", choices=["auto", "digits", "mnist"], default="auto")
    parser.add_argument("--folder", type=Path, default=Path("data"), help="where torchvision puts MNIST")
    parser.add_argument(
        "--side", type=int, default=28, help="pixels to which scikit-learn's images are enlarged"
    )
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=64, help="images in each step, on all ranks together")
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument(
        "--no-dropout", action="store_true", help="then any number of ranks gives the same curve"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
