"""Import and export of checkpoints larger than the memory limit, each in its own process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from exchange.stock import save_dcp
from programs import run_python

NUM_BYTES = 128 << 20
LIMIT_BYTES = 80 << 20

MEASURE = """
import json, sys, re
from pathlib import Path
import torch, torch.distributed.checkpoint
import holdfast
from holdfast.checkpoint.exchange.importer import import_checkpoint
from holdfast.checkpoint.exchange.exporter import export_checkpoint

def bytes_of(field):
    found = re.search(field + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024

def peak(work):
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before = bytes_of("VmRSS")
    work()
    return bytes_of("VmHWM") - before

source, kind, place = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
warm = place / "warm"
torch.save({"w": torch.ones(2), "n": 1}, place / "warm.pt")
import_checkpoint(place / "warm.pt", warm)
export_checkpoint(holdfast.open(warm), place / f"warm-{kind}", kind=kind)
into = peak(lambda: import_checkpoint(source, place / "home"))
out = peak(lambda: export_checkpoint(holdfast.open(place / "home"), place / f"out-{kind}", kind=kind))
print(json.dumps([into, out]))
"""


def make(kind: str, folder: Path) -> Path:
    """Write a source of `NUM_BYTES` with a large tensor and many small ones."""
    side = 9 << 9
    big = torch.arange(side * side, dtype=torch.int32).view(side, side)
    rest = (NUM_BYTES - big.nbytes) // 64
    state = {"big": big, **{f"small.{i}": torch.full((rest // 4,), i, dtype=torch.int32) for i in range(64)}}
    if kind == "torch":
        torch.save(state, folder / "in.pt")
        return folder / "in.pt"
    if kind == "dcp":
        save_dcp(state, folder / "in")
        return folder / "in"
    path = folder / "in.safetensors"
    save_file(state, path)
    return path


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("torch", "dcp"),
        pytest.param("dcp", "torch", marks=pytest.mark.slow),
        pytest.param("safetensors", "hf", marks=pytest.mark.slow),
    ],
)
def test_memory_does_not_grow_with_the_size(tmp_path: Path, source: str, target: str) -> None:
    path = make(source, tmp_path)
    into, out = json.loads(run_python(MEASURE, path, target, tmp_path).splitlines()[-1])
    assert into < LIMIT_BYTES
    assert out < LIMIT_BYTES
    assert (tmp_path / f"out-{target}").exists()
