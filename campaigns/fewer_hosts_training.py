"""Training on as many hosts as there are, for `campaigns.fewer_hosts`: `fewer_hosts_training.py HOME LOGS`.

The samples of a step are those of its global batch, whatever the number of ranks. Each rank computes the
gradient of each of its samples alone, and all ranks add those of the batch in one order. So the weights are,
bit for bit, those of any other number of ranks. Each rank writes what it has done, as lines of JSON, into a
file of its own in LOGS.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import itertools
import json
import math
import os
import socket
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import holdfast
from holdfast.checkpoint.keeper import Save
from holdfast.system.rawbytes import view_bytes
from holdfast.train.data import GlobalBatches

SAMPLES, BATCH, WIDTH = 2400, 24, 64  # a batch can be divided by 1, 3, 4, 6 and 8 ranks


def main() -> None:
    """Train to the last step, from the newest checkpoint."""
    parser = argparse.ArgumentParser()
    parser.add_argument("home")
    parser.add_argument("logs", type=Path)
    parser.add_argument("--steps", type=int, help="default: the number in a file `steps` in LOGS")
    parser.add_argument("--every", type=int, default=2)
    parser.add_argument("--peers", type=int)
    parser.add_argument("--bandwidth", help="to home, per second, while there is a file `slow` in LOGS")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds of each step")
    parser.add_argument("--timeout", type=float, default=20.0, help="seconds that a rank waits for others")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=args.timeout))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    log = (args.logs / f"{socket.gethostname()}-{os.getpid()}-{rank}.jsonl").open("a", buffering=1)

    def send(**facts: object) -> None:
        log.write(json.dumps({"rank": rank, "world": world_size, "at_s": time.monotonic(), **facts}) + "\n")

    send(host=socket.gethostname())
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    data = torch.utils.data.TensorDataset(torch.arange(SAMPLES), torch.randn(SAMPLES, WIDTH))
    batches = GlobalBatches(SAMPLES, BATCH, seed=1)
    loader = torch.utils.data.DataLoader(data, batch_sampler=batches)
    state = {"net": net, "optimizer": optimizer, "batches": batches}
    saves: list[Save] = []
    home = holdfast.Home(args.home, bandwidth=args.bandwidth if (args.logs / "slow").exists() else None)
    with holdfast.Checkpointer(home, state, every=args.every, peers=args.peers) as ckpt:
        step = ckpt.restore() or 0
        send(restored=step)
        stream = itertools.chain.from_iterable(loader for _ in itertools.count())
        while step < last_step(args):
            numbers, loss = take_step(net, optimizer, *next(stream))
            time.sleep(args.pause)
            step += 1
            if ckpt.should_save(step):
                saves.append(ckpt.save(step))
            if ckpt.preempted:
                send(step=step, samples=numbers, loss=loss)
                ckpt.stop(step)
            mirrored = max((save.step for save in saves if save.mirrored), default=0)
            send(step=step, samples=numbers, loss=loss, mirrored=mirrored)
    text = hashlib.sha256(b"".join(map(bytes, map(view_bytes, net.state_dict().values()))))
    send(sha256=text.hexdigest())
    dist.barrier()
    holdfast.hard_exit(0)


def last_step(args: argparse.Namespace) -> float:
    """Return the last step of the training, as far as it is known."""
    file = args.logs / "steps"
    return args.steps or (int(file.read_text()) if file.exists() else math.inf)


def take_step(
    net: nn.Module, optimizer: torch.optim.Optimizer, numbers: Tensor, rows: Tensor
) -> tuple[list[int], float]:
    """Take a step with this rank's samples. Return the samples of all ranks, and the loss."""
    found = []
    for number, row in zip(numbers, rows, strict=True):
        optimizer.zero_grad()
        loss = (net(row) - row.sum().sin()).square().mean()
        loss.backward()
        gradients = [weight.grad.flatten() for weight in net.parameters() if weight.grad is not None]
        found.append(torch.cat([number.reshape(1).float(), loss.detach().reshape(1), *gradients]))
    own = torch.stack(found)
    of_ranks = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(of_ranks, own)
    batch = torch.cat(of_ranks)
    batch = batch[batch[:, 0].argsort()]  # the order in which all ranks add
    mean = batch[:, 1:].mean(dim=0)
    loss, *_ = parts = mean.split([1, *(weight.numel() for weight in net.parameters())])
    for weight, part in zip(net.parameters(), parts[1:], strict=True):
        weight.grad = part.view_as(weight).clone()
    optimizer.step()
    return batch[:, 0].int().tolist(), loss.item()


if __name__ == "__main__":
    main()
