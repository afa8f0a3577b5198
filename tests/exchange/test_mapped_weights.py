"""Weights that are mapped from a file: equal, tied as they were, and without memory of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import holdfast
from holdfast.checkpoint.exchange.exporter import map_weights
from holdfast.checkpoint.format import names
from holdfast.checkpoint.store import open_store
from holdfast.errors import Corrupt, NotFound
from making import flip
from programs import run_python
from stage.training import make_checkpointer

MEASURE = """
import json, re, sys
from pathlib import Path
import safetensors.torch
import holdfast
from holdfast.checkpoint.exchange.exporter import map_weights

def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

home, place = Path(sys.argv[1]), Path(sys.argv[2])
map_weights(holdfast.open(home, 1), "model", place)
before = anonymous()
found = map_weights(holdfast.open(home, 2), "model", place)
total = sum(float(one.sum()) for one in found.values())  # read all of it
print(json.dumps([anonymous() - before, sum(one.nbytes for one in found.values()), total]))
"""


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.out = nn.Linear(3, 5)
        self.out.weight = self.embed.weight


def test_mapped_weights_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    model = Tied()
    with make_checkpointer(tmp_path / "home", {"model": model, "n": 1}) as ckpt:
        ckpt.save(1)
    found = map_weights(holdfast.open(tmp_path / "home"), "model", tmp_path)
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())
    assert found["out.weight"] is found["embed.weight"]
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def test_damaged_weights_are_refused_and_leave_no_file(tmp_path: Path) -> None:
    with make_checkpointer(tmp_path / "home", {"model": Tied()}) as ckpt:
        ckpt.save(1)
    flip(open_store(tmp_path / "home"), names.data(1, 1, 0), -5)
    with pytest.raises(Corrupt):
        map_weights(holdfast.open(tmp_path / "home"), "model", tmp_path)
    with pytest.raises(NotFound):
        map_weights(holdfast.open(tmp_path / "home"), "other", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def test_mapped_weights_take_no_memory_of_their_own(tmp_path: Path) -> None:
    num_bytes = 256 << 20
    model = nn.ParameterDict({"a": nn.Parameter(torch.zeros(4))})
    with make_checkpointer(tmp_path / "home", {"model": model}) as ckpt:
        ckpt.save(1)
    model["a"] = nn.Parameter(torch.ones(num_bytes // 4))
    with make_checkpointer(tmp_path / "home", {"model": model}) as ckpt:
        ckpt.continue_from()
        ckpt.save(2)
    said = run_python(MEASURE, tmp_path / "home", tmp_path)
    grown, size, total = json.loads(said.splitlines()[-1])
    assert (size, total) == (num_bytes, num_bytes // 4)
    assert grown < num_bytes // 4
