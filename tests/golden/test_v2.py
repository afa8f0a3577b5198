"""Checkpoints of format version 2 load for ever, with exactly these contents."""

from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict_loader import load

from golden.make_v2 import ROWS, STATE
from holdfast.adapters.dcp import HoldfastReader
from holdfast.checkpoint.format.manifest import SEVERAL_REGIONS
from holdfast.checkpoint.restore.checkpoint import open as open_checkpoint

HOME = Path(__file__).parent / "v2" / "several-regions"


def test_every_byte_verifies() -> None:
    report = open_checkpoint(HOME).verify()
    assert report.is_good
    assert report.extra == ()


def test_its_documents_have_version_2() -> None:
    documents = list((HOME / "step-00000003").glob("*.json"))
    assert len(documents) == 1 + len(ROWS)
    assert all(b'"version":%d,' % SEVERAL_REGIONS in path.read_bytes()[:120] for path in documents)


def test_its_tensors_are_whole() -> None:
    opened = open_checkpoint(HOME)
    for name in ("w", "b"):
        assert torch.equal(opened[name], STATE[name])


def test_its_values_and_tensors_are_loaded_by_dcp() -> None:
    found = {"w": torch.zeros(10, 4), "b": torch.zeros(10, dtype=torch.int16), "note": ""}
    load(found, storage_reader=HoldfastReader(HOME))
    assert found["note"] == STATE["note"]
    assert torch.equal(found["w"], STATE["w"])
