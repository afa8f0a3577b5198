"""A data file is a plain safetensors file for every reader."""

from __future__ import annotations

import json
import struct
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed

from holdfast.checkpoint.format.dtypes import ITEM_BYTES, TORCH_NAMES
from holdfast.checkpoint.format.layout import (
    BLOCK_BYTES,
    FileLayout,
    Shard,
    check_name,
    lay_out,
    parse_header,
)
from holdfast.checkpoint.state.tensors import torch_dtype
from holdfast.errors import Corrupt, InvalidInput
from making import random_tensor, raw_bytes

keys = st.text(st.characters(exclude_categories=["Cs"]), max_size=20).filter(
    lambda key: key != "__metadata__" and not key.rstrip("0123456789").endswith("@r")
)
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
DTYPES = sorted(name for name in ITEM_BYTES if hasattr(torch, TORCH_NAMES[name]))  # of this torch
wholes = st.builds(Shard.whole, keys, st.sampled_from(DTYPES), shapes, per_rank=st.booleans())
shard_lists = st.lists(wholes, max_size=8, unique_by=lambda shard: shard.name)


def filled(layout: FileLayout, tensors: list[torch.Tensor]) -> bytes:
    """The file image, each tensor at its place."""
    image = bytearray(layout.file_bytes)
    image[: len(layout.header)] = layout.header
    for start, tensor in zip(layout.starts, tensors, strict=True):
        data = raw_bytes(tensor)
        image[start : start + len(data)] = data
    return bytes(image)


@given(shard_lists, st.integers(0, 3))
def test_stock_safetensors_reads_every_layout(shards: list[Shard], rank: int) -> None:
    """All dtypes, no dimensions, no elements, any names: the library's own validation accepts them."""
    layout = lay_out(shards, rank)
    tensors = [
        random_tensor(torch_dtype(shard.dtype), shard.sizes, seed) for seed, shard in enumerate(shards)
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "f.safetensors"
        path.write_bytes(filled(layout, tensors))
        loaded = load_file(path)
    assert set(loaded) == {shard.file_key(rank) for shard in shards}
    for shard, tensor in zip(shards, tensors, strict=True):
        found = loaded[shard.file_key(rank)]
        assert found.dtype == tensor.dtype
        assert found.shape == tensor.shape
        assert raw_bytes(found) == raw_bytes(tensor)


@given(shard_lists, st.integers(0, 3))
def test_data_starts_at_a_block_and_has_no_holes(shards: list[Shard], rank: int) -> None:
    """And every tensor begins at a multiple of its element size."""
    layout = lay_out(shards, rank)
    assert len(layout.header) % BLOCK_BYTES == 0
    position, placed = len(layout.header), list(zip(layout.starts, shards, strict=True))
    for start, stop in sorted((start, start + shard.num_bytes) for start, shard in placed):
        assert start == position
        position = stop
    assert position == layout.file_bytes
    assert all(start % ITEM_BYTES[shard.dtype] == 0 for start, shard in placed)


@given(shard_lists, st.integers(0, 3), st.binary(max_size=64))
def test_the_header_round_trips(shards: list[Shard], rank: int, data: bytes) -> None:
    layout = lay_out(shards, rank)
    entries, data_start = parse_header(layout.header + data, "file")
    assert data_start == len(layout.header)
    metadata = entries.pop("__metadata__")
    assert metadata["format"] == "pt"
    sharding = json.loads(metadata["DCP_SHARDING_INFO"])
    assert set(entries) == set(sharding) == {shard.file_key(rank) for shard in shards}
    for shard, start in zip(shards, layout.starts, strict=True):
        entry = entries[shard.file_key(rank)]
        assert (entry["dtype"], tuple(entry["shape"])) == (shard.dtype, shard.sizes)
        assert [data_start + offset for offset in entry["data_offsets"]] == [start, start + shard.num_bytes]


def test_every_dtype_has_a_torch_dtype_of_its_size() -> None:
    assert set(ITEM_BYTES) == set(TORCH_NAMES)
    for name in DTYPES:
        assert torch_dtype(name).itemsize == ITEM_BYTES[name]


@pytest.mark.filterwarnings("ignore")  # torch tells that it runs without a process group
def test_stock_torch_loads_and_reshards_the_files_of_two_ranks(tmp_path: Path) -> None:
    """`dcp.load` joins a sharded tensor, and has per-rank tensors under their own keys."""
    whole, generator = torch.randn(8, 300), torch.Generator()
    values = {
        "w": whole,
        "scale": torch.tensor(2.5),
        "none": torch.zeros(0, 7),
        "half": torch.randn(3).bfloat16(),
        "rng": generator.manual_seed(1).get_state(),
        "rng@r1": generator.manual_seed(2).get_state(),
    }
    rng = Shard.whole("rng", "U8", tuple(values["rng"].shape), per_rank=True)
    scale, none = Shard.whole("scale", "F32", ()), Shard.whole("none", "F32", (0, 7))
    ranks = [
        (
            [Shard("w", "F32", (8, 300), (0, 0), (5, 300)), rng, scale, none],
            [whole[:5], values["rng"], values["scale"], values["none"]],
        ),
        (
            [Shard.whole("half", "BF16", (3,)), rng, Shard("w", "F32", (8, 300), (5, 0), (3, 300))],
            [values["half"], values["rng@r1"], whole[5:]],
        ),
    ]
    for rank, (shards, tensors) in enumerate(ranks):
        (tmp_path / f"rank-{rank}.safetensors").write_bytes(filled(lay_out(shards, rank), tensors))
        keys = {shard.file_key(rank) for shard in shards}
        assert set(load_file(tmp_path / f"rank-{rank}.safetensors")) == keys
    reader = pytest.importorskip("torch.distributed.checkpoint.hf_storage").HuggingFaceStorageReader
    target = {name: torch.full_like(value, 77) for name, value in values.items()}
    load_distributed(target, storage_reader=reader(str(tmp_path)))
    for name, value in values.items():
        assert torch.equal(target[name], value), name


@pytest.mark.parametrize("name", ["__metadata__", "w@r1", "layer.0@r15", "a\udcff"])
def test_reserved_and_invalid_names_are_refused(name: str) -> None:
    for refuse in (lambda: check_name(name), lambda: lay_out([Shard.whole(name, "F32", (1,))], 0)):
        with pytest.raises(InvalidInput) as caught:
            refuse()
        assert caught.value.key == name


@pytest.mark.parametrize("name", ["", "w@r", "@r1.w", "w@r1x", "w@s1", "__metadata__.x"])
def test_names_similar_to_reserved_ones_are_accepted(name: str) -> None:
    check_name(name)


def test_two_shards_of_one_tensor_in_a_file_are_refused() -> None:
    """A safetensors file holds a key once; the second would silently replace the first."""
    shards = [Shard("w", "F32", (4,), (0,), (1,)), Shard("w", "F32", (4,), (3,), (1,))]
    with pytest.raises(InvalidInput, match="two shards of w"):
        lay_out(shards, 0)


def test_a_header_over_the_limit_is_refused() -> None:
    shards = [Shard.whole(f"{number}{'x' * 1_000_000}", "F32", ()) for number in range(51)]
    with pytest.raises(InvalidInput, match="100 MB"):
        lay_out(shards, 0)


@pytest.mark.parametrize(
    "head",
    [
        *(b"", b"short", struct.pack("<Q", 0) + b"{}"),
        *(struct.pack("<Q", num_bytes) + b"{}" for num_bytes in (10, 2**63)),
        *(struct.pack("<Q", 2) + b"{x", struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 4) + b'"\xff"}'),
        struct.pack("<Q", 90_000) + b"[" * 90_000,
    ],
)
def test_an_invalid_header_is_corrupt(head: bytes) -> None:
    with pytest.raises(Corrupt, match="the-file"):
        parse_header(head, "the-file")
