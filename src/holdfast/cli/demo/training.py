"""Training of the demo: a byte-level GPT on the source code of Python's standard library.

With a home it saves through Holdfast; without one it is the reference. All random numbers come from torch's
generator, so two runs with the same state compute the same.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional

import holdfast
from holdfast.system.rawbytes import view_bytes

CONTEXT, WIDTH, HEADS, BLOCKS, BATCH = 64, 192, 6, 4, 8
CORPUS_BYTES = 4 << 20
_BYTES_PER_WEIGHT = 12  # a float32 and AdamW's two averages of it
_FIXED_WEIGHTS = BLOCKS * 12 * WIDTH**2 + (256 + CONTEXT) * WIDTH


class TransformerBlock(nn.Module):
    """A transformer block: causal attention and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attend, self.gather = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.think = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, position, WIDTH) float32 to the same shape."""
        heads = self.attend(self.before(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.dropout(self.gather(found.transpose(1, 2).flatten(-2)))
        return x + self.dropout(self.think(self.between(x)))


class Gpt(nn.Module):
    """A GPT over bytes and pairs of bytes.

    The rows of the embedding of pairs take memory but hardly time: they determine the size of a checkpoint.
    """

    def __init__(self, num_pairs: int) -> None:
        super().__init__()
        self.byte, self.place = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.pair = nn.Embedding(num_pairs, WIDTH)
        self.blocks = nn.Sequential(*(TransformerBlock() for _ in range(BLOCKS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        self.head.weight = self.byte.weight
        for table in (self.byte, self.place, self.pair):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        """Map (batch, CONTEXT) int64 bytes to (batch, CONTEXT, 256) float32 logits of each next byte."""
        pairs = (text * 256 + functional.pad(text, (1, 0))[:, :-1]) % self.pair.num_embeddings
        x = self.byte(text) + self.pair(pairs) + self.place.weight
        return self.head(self.norm(self.blocks(x)))


def corpus() -> Tensor:
    """Return the first CORPUS_BYTES of the standard library's source as uint8."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= CORPUS_BYTES:
            break
    return torch.frombuffer(text, dtype=torch.uint8)[:CORPUS_BYTES]


def batch(text: Tensor) -> tuple[Tensor, Tensor]:
    """Return a random batch: (BATCH, CONTEXT) int64 bytes, and the byte after each of them."""
    starts = torch.randint(len(text) - CONTEXT, (BATCH, 1))
    window = text[starts + torch.arange(CONTEXT + 1)].long()
    return window[:, :-1], window[:, 1:]


def average_gradients(model: nn.Module) -> None:
    """Average the gradients over all ranks, each in an order that does not depend on the step."""
    for weight in model.parameters():
        if weight.grad is not None:
            distributed.all_reduce(weight.grad)
            weight.grad /= distributed.get_world_size()


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return the sha256 of the weights and the state of the optimizer."""
    text = hashlib.sha256()
    for name, weight in model.named_parameters():
        text.update(name.encode())
        text.update(view_bytes(weight.detach()))
        for key, value in sorted(optimizer.state[weight].items()):
            text.update(key.encode())
            text.update(view_bytes(value))
    return text.hexdigest()


@contextlib.contextmanager
def protected(args: argparse.Namespace, state: dict[str, object]) -> Iterator[Iterable[int]]:
    """Yield the steps of the training: those of a Checkpointer with a home, else plain numbers."""
    if args.home is None:
        yield range(args.steps)
    else:
        with holdfast.Checkpointer(
            holdfast.Home(args.home, bandwidth=args.bandwidth),
            state,
            every=args.every,
            local=args.local,
            memory=holdfast.Memory(keep_for=args.hold),
            peers=args.peers,
        ) as ckpt:
            yield ckpt.steps(args.steps)


def main() -> None:
    """Train, and print every step as a line of JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--home")
    parser.add_argument("--local", help="local folder")
    parser.add_argument("--hold", default="0", help="how long the keeper holds its memory after the end")
    parser.add_argument("--peers", type=int, help="hosts that hold a copy of each save in memory")
    parser.add_argument("--bandwidth", help="bytes per second that this rank may send home")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--every", type=int, required=True)
    parser.add_argument("--bytes", type=int, required=True, help="approximate size of a checkpoint")
    args = parser.parse_args()

    def send(**facts: object) -> None:
        print(json.dumps(facts), flush=True)

    torch.set_num_threads(1)  # the two runs share the machine, and must add in the same order
    torch.manual_seed(1)
    text = corpus()
    num_pairs = max(1, (args.bytes // _BYTES_PER_WEIGHT - _FIXED_WEIGHTS) // WIDTH)
    model = Gpt(num_pairs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    is_distributed = "WORLD_SIZE" in os.environ
    if is_distributed:
        distributed.init_process_group("gloo")
        torch.manual_seed(1 + distributed.get_rank())  # batches of its own
    with protected(args, state) as steps:
        for step in steps:
            inputs, targets = batch(text)
            loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            if is_distributed:
                average_gradients(model)
            optimizer.step()
            scheduler.step()
            send(step=step + 1, loss=round(loss.item(), 4))
    send(sha256=digest(model, optimizer))


if __name__ == "__main__":
    main()
