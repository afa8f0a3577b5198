"""Training on several hosts for `campaigns.lost_hosts`: prints what each rank has done, as lines of JSON."""

from __future__ import annotations

import argparse
import hashlib
import json
import socket
import time

import torch
import torch.distributed as dist
from torch import nn

import holdfast
from holdfast.checkpoint.keeper import Save
from holdfast.system.rawbytes import view_bytes


def main() -> None:
    """Train to the last step, from the newest checkpoint."""
    parser = argparse.ArgumentParser()
    parser.add_argument("home")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--peers", type=int)
    parser.add_argument("--peers-network", help="network of the peers' own addresses, such as 10.84.0")
    parser.add_argument("--peers-memory", default="1GiB")
    parser.add_argument("--bandwidth", help="to home, per second")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--pause", type=float, default=0.05, help="seconds of each step")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net, each = nn.Linear(args.width, args.width), torch.zeros(8)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    state = {"net": net, "optimizer": optimizer, "each": each}

    peers = args.peers
    if args.peers_network:
        address = f"{args.peers_network}.{socket.gethostname().removeprefix('host')}"
        peers = holdfast.Peers(args.peers, address=address, memory=args.peers_memory)

    def send(**facts: object) -> None:
        print(json.dumps({"rank": rank, **facts}), flush=True)

    ckpt = holdfast.Checkpointer(
        holdfast.Home(args.home, bandwidth=args.bandwidth),
        state,
        every=args.every,
        peers=peers,
        limits=holdfast.Limits(rank_timeout="20s", commit_timeout="60s"),
    )
    saves: list[Save] = []
    with ckpt:
        step = ckpt.restore() or 0
        send(restored=step)
        while step < args.steps:
            rows = torch.randn(4, args.width, generator=torch.Generator().manual_seed(step * 64 + rank))
            optimizer.zero_grad()
            net(rows).square().mean().backward()
            for weight in net.parameters():  # in an order of its own: DDP sums otherwise in its first step
                assert weight.grad is not None
                dist.all_reduce(weight.grad)
            optimizer.step()
            each += step * (rank + 1)
            time.sleep(args.pause)
            step += 1
            if ckpt.should_save(step):
                saves.append(ckpt.save(step))
            mirrored = [save.step for save in saves if save.mirrored]
            durable = [save.step for save in saves if save.durable]
            newest = max(mirrored, default=0), max(durable, default=0)
            send(step=step, mirrored=newest[0], durable=newest[1], at_s=round(time.monotonic(), 4))
    text = hashlib.sha256(b"".join(map(bytes, map(view_bytes, [*net.state_dict().values(), each]))))
    send(sha256=text.hexdigest())
    dist.barrier()


if __name__ == "__main__":
    main()
