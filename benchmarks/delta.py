"""Bytes of a save on a slow link: compressed as it is, as byte planes, as a difference, and by moonclip.

A small GPT trains on the text of docs/, with weights and AdamW's state in fp32 or bf16 (computed in fp32), at
a learning rate of 0.001, or of 0.00001 from 50 steps before the base on, as in fine-tuning. Saves follow 1,
10 and 100 steps after the base. Every way is lossless, and what it packs is unpacked and compared.
Speeds are per second of processor time, of one core.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("MOONCLIP_THREADS", "1")

import machine
import numpy as np
import torch
import zstandard
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional

HERE = Path(__file__).resolve().parent
WAYS = ("zstd", "planes", "difference", "difference + planes")
LATER = (1, 10, 100)
RATES = (1e-3, 1e-5)
LEVEL = 1
BLOCK_BYTES = 4 << 20
WIDTH, LAYERS, LENGTH, BATCH = 256, 4, 128, 8
console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 160)


def main() -> int:
    """Train, pack each save in every way, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=int, default=200, help="step of the base")
    parser.add_argument("--out", type=Path, help="default results/delta_<hardware>_<date>.json")
    options = parser.parse_args()
    facts = machine.describe(HERE)
    kinds = itertools.product(("fp32", "bf16"), RATES)
    rows = [row for kind, rate in kinds for row in _measure(kind, rate, options.base)]
    path = options.out or machine.results_path("delta", facts)
    path.write_text(json.dumps({"machine": facts, "base": options.base, "rows": rows}, indent=1) + "\n")
    names = ("dtype", "rate", "steps", "way", "share", "pack", "unpack")
    table = Table(*names, title=f"{rows[0]['plain_bytes'] / 1e6:.0f} MB in fp32; MB/s of one core")
    for row in rows:
        table.add_row(
            row["dtype"], str(row["rate"]), str(row["steps"]), row["way"], f"{row['share']:.3f}",
            *(f"{row[key]:.0f}" for key in ("pack_mb_s", "unpack_mb_s")),
        )  # fmt: skip
    console.print(table)
    console.print(f"wrote {path}")
    return 0


def _measure(kind: str, rate: float, base_step: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each save and way."""
    base: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory() as folder:
        moonclip = _Moonclip(Path(folder))
        steps = train(kind, rate, base_step)
        for step, model, optimizer in itertools.islice(steps, base_step + max(LATER)):
            if step != base_step and step - base_step not in LATER:
                continue
            state = _tensors(model, optimizer)
            plain_bytes = sum(len(data) for _, data in state.values())
            row: dict[str, Any] = {
                "dtype": kind,
                "rate": rate,
                "steps": step - base_step,
                "plain_bytes": plain_bytes,
            }
            found = moonclip.save(step, model, optimizer)
            if step == base_step:
                base = {name: data for name, (_, data) in state.items()}
                continue
            for way in WAYS:
                yield row | {"way": way} | _pack_all(way, state, base, plain_bytes)
            yield row | {"way": "moonclip"} | _rates(plain_bytes, *found)
            console.print(f"{kind}, rate {rate}, {step - base_step} steps after the base")


def train(
    kind: str, rate: float, base_step: int, width: int = WIDTH
) -> Iterator[tuple[int, nn.Module, torch.optim.Optimizer]]:
    """Train, and yield the number of each step, the model and the optimizer, without end."""
    torch.manual_seed(0)
    text = b"".join(path.read_bytes() for path in sorted((HERE.parent / "docs").rglob("*.md")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    model = GPT(width)
    if kind == "bf16":
        model.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATES[0])
    for step in itertools.count(1):
        optimizer.param_groups[0]["lr"] = rate if step > base_step - 50 else RATES[0]
        starts = torch.randint(len(data) - LENGTH - 1, (BATCH,)).tolist()
        tokens = torch.stack([data[start : start + LENGTH + 1] for start in starts])
        weights = {name: weight.float() for name, weight in model.named_parameters()}
        logits = torch.func.functional_call(model, weights, (tokens[:, :-1],))
        optimizer.zero_grad()
        functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        yield step, model, optimizer


class GPT(nn.Module):
    """A GPT of bytes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next bytes."""
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.places.weight)))


class Block(nn.Module):
    """A transformer's block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend, then think."""
        parts = self.queries(self.first(x)).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (8, -1)).transpose(1, 2) for part in parts)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(-2))
        return x + self.narrow(functional.gelu(self.wide(self.second(x))))


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, tuple[int, bytes]]:
    """Return the bytes of each element and of the whole of every tensor, by name."""
    found = {name: weight.detach() for name, weight in model.named_parameters()}
    for name, weight in model.named_parameters():
        for key, value in optimizer.state[weight].items():
            found[f"{key}.{name}"] = value
    return {
        name: (tensor.element_size(), tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        for name, tensor in found.items()
    }


def _pack_all(
    way: str, state: dict[str, tuple[int, bytes]], base: dict[str, bytes], plain_bytes: int
) -> dict[str, float]:
    num_bytes, pack_s, unpack_s = 0, 0.0, 0.0
    for name, (width, data) in state.items():
        for start in range(0, len(data), BLOCK_BYTES):
            block, old = data[start : start + BLOCK_BYTES], base[name][start : start + BLOCK_BYTES]
            began = time.process_time()
            packed = _pack(way, block, old, width)
            packed_at = time.process_time()
            if _unpack(way, packed, old, width) != block:
                raise RuntimeError(f"{way} changes {name}")
            pack_s += packed_at - began
            unpack_s += time.process_time() - packed_at
            num_bytes += len(packed)
    return _rates(plain_bytes, num_bytes, pack_s, unpack_s)


def _rates(plain_bytes: int, num_bytes: int, pack_s: float, unpack_s: float) -> dict[str, float]:
    megabytes = plain_bytes / 1e6
    share = num_bytes / plain_bytes
    return {"share": share, "pack_mb_s": megabytes / pack_s, "unpack_mb_s": megabytes / unpack_s}


def _pack(way: str, block: bytes, base: bytes, width: int) -> bytes:
    found = np.frombuffer(block, np.uint8)
    if "difference" in way:
        found = found ^ np.frombuffer(base, np.uint8)
    if "planes" in way:
        found = np.ascontiguousarray(found.reshape(-1, width).T)
    return zstandard.ZstdCompressor(level=LEVEL).compress(found.tobytes())


def _unpack(way: str, packed: bytes, base: bytes, width: int) -> bytes:
    found = np.frombuffer(zstandard.ZstdDecompressor().decompress(packed), np.uint8)
    if "planes" in way:
        found = np.ascontiguousarray(found.reshape(width, -1).T).reshape(-1)
    if "difference" in way:
        found = found ^ np.frombuffer(base, np.uint8)
    return found.tobytes()


class _Moonclip:
    """moonclip with its defaults, without its background thread."""

    def __init__(self, folder: Path) -> None:
        from moonclip import CheckpointManager  # pyright: ignore[reportMissingImports] - in peers/requirements.txt

        self._folder = folder
        self._manager = CheckpointManager(str(folder), async_save=False, world_size=1, rank=0)

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, float, float]:
        """Return the bytes that a save adds, and the seconds of the save and of a load that is compared."""
        before, began = self._num_bytes(), time.process_time()
        name = self._manager.save(step, model=model, optimizer=optimizer)
        self._manager.flush()
        saved_s, num_bytes = time.process_time() - began, self._num_bytes() - before
        loaded = copy.deepcopy(model)
        for weight in loaded.parameters():
            weight.data.zero_()
        began = time.process_time()
        self._manager.load(name, model=loaded, optimizer=torch.optim.AdamW(loaded.parameters()))
        loaded_s = time.process_time() - began
        for old, new in zip(model.parameters(), loaded.parameters(), strict=True):
            if not torch.equal(old, new):
                raise RuntimeError("moonclip has changed a weight")
        return num_bytes, saved_s, loaded_s

    def _num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self._folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    sys.exit(main())
