"""Indices and packs: what goes in comes out, and nothing else is taken; the environment that they are for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.format.sealed import dumps, seal, unseal_lines
from holdfast.errors import Corrupt, HoldfastError, InvalidInput, Unsupported
from holdfast.watch.compiled import directory as directories
from holdfast.watch.compiled import transfer as indices
from holdfast.watch.compiled.directory import check_path, environment_key
from holdfast.watch.compiled.transfer import CacheIndex, IndexName, PackedFile, PackName, pack, unpack

KEY = "0123456789abcdef" * 2
FACTS = {"cpu": "flags: avx2", "torch": "2.13.0"}
PATHS = st.lists(st.from_regex(r"[a-z0-9_.-]{1,8}", fullmatch=True), min_size=1, max_size=3).map("/".join)
GOOD_PATHS = PATHS.filter(lambda path: not {".", ".."} & set(path.split("/")))


@given(st.dictionaries(GOOD_PATHS, st.binary(max_size=200), max_size=6))
def test_files_survive_packing(files: dict[str, bytes]):
    whole, places = pack(files)
    assert {file.path: unpack(whole, file, "pack") for file in places} == files
    assert pack(dict(reversed(files.items()))) == (whole, places)
    index = CacheIndex(3, 1, 2, FACTS, ("1" * 32,), places)
    assert indices.parse(indices.document(index), str(IndexName(3, 1, 2, KEY))) == index


@given(st.binary(min_size=1, max_size=100), st.integers(min_value=0), st.integers(0, 7))
def test_any_flipped_bit_is_found(data: bytes, where: int, bit: int):
    whole, (file,) = pack({"file": data})
    damaged = bytearray(whole)
    damaged[where % len(whole)] ^= 1 << bit
    try:
        found = unpack(bytes(damaged), file, "pack")
    except Corrupt:
        return
    assert found == data  # a bit that means nothing to zlib


def test_a_file_that_decompresses_to_more_than_its_size_is_rejected():
    whole, (file,) = pack({"file": bytes(1 << 20)})
    small = PackedFile("file", 10, file.hash, file.pack, file.offset, file.packed_bytes)
    with pytest.raises(Corrupt, match="expected 10 bytes"):
        unpack(whole, small, "pack")


@pytest.mark.parametrize(
    "path",
    [
        *("../out", "/etc/passwd", "a/../../out", "a//b", "", ".", "a/./b", "a\\..\\b"),
        *("nul\0", "x" * 300, "\udc80"),
    ],
)
def test_a_path_out_of_the_directory_is_rejected_in_a_sealed_index(path: str):
    with pytest.raises(InvalidInput):
        check_path(path)
    index = CacheIndex(1, 0, 1, FACTS, ("1" * 32,), (PackedFile("good", 1, "0" * 32, 0, 0, 1),))
    body = json.loads(unseal_lines(indices.document(index), "index")[0])
    body["files"][0][0] = path
    try:
        text = seal(dumps(body))
    except UnicodeEncodeError:
        return  # no such document can be written
    with pytest.raises(Corrupt):
        indices.parse(text, str(IndexName(1, 0, 1, KEY)))


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("files", [["a", -1, "", 0, 0, 1]]),
        ("files", [["a", 1, "0" * 32, 9, 0, 1]]),
        ("files", [1]),
        ("facts", 1),
    ],
)
def test_a_sealed_index_with_invalid_members_is_corrupt(member: str, value: object):
    body = json.loads(unseal_lines(indices.document(CacheIndex(1, 0, 1, FACTS, (), ())), "index")[0])
    body |= {member: value}
    with pytest.raises(Corrupt, match="not a valid index of compiled files"):
        indices.parse(seal(dumps(body)), str(IndexName(1, 0, 1, KEY)))


def test_an_index_with_a_wrong_name_or_a_newer_version_is_rejected():
    text = indices.document(CacheIndex(1, 0, 1, FACTS, (), ()))
    with pytest.raises(Corrupt, match="wrong name"):
        indices.parse(text, str(IndexName(2, 0, 1, KEY)))
    newer = seal(dumps(json.loads(unseal_lines(text, "index")[0]) | {"version": 2}))
    with pytest.raises(Unsupported):
        indices.parse(newer, str(IndexName(1, 0, 1, KEY)))
    with pytest.raises(HoldfastError):
        indices.parse(text[:-3], str(IndexName(1, 0, 1, KEY)))


@given(st.integers(0, 10**9 - 1), st.integers(0, 10**6), st.integers(1, 10**6))
def test_names_are_parsed_into_their_parts(attempt: int, rank: int, number: int):
    for name in (IndexName(attempt, rank, number, KEY), PackName(KEY, attempt, KEY)):
        assert indices.parse_name(str(name)) == name
    assert str(IndexName(3, 0, 1, KEY)) == f"compiled/{KEY}/a0003-rank-00000-0001.json"
    assert str(PackName(KEY, 3, KEY)) == f"compiled/{KEY}/a0003-{KEY}.pack"


@pytest.mark.parametrize(
    "name", ["compiled/x/a0001.json", "step-00000001/rank-00000-a0001.json", "compiled/"]
)
def test_other_names_are_ignored(name: str):
    assert indices.parse_name(name) is None


def test_of_each_writer_the_newest_index_comes_first():
    names = [IndexName(*facts, KEY) for facts in ((1, 0, 1), (2, 0, 9), (2, 0, 10), (2, 1, 1))]
    assert indices.newest(names) == [[names[3]], [names[2], names[1]], [names[0]]]


def test_a_golden_index_stays_readable():
    whole = bytes.fromhex("789cab77f571030003ad0157789c4b2f4a2cc80000063b0213")
    text = (
        b'{"xxh3_128":"85c30dc5eb5c2d20cedf06db6274ab6d","format":"holdfast-compiled","version":1,"attempt":3,'
        b'"rank":1,"number":2,"facts":{"cpu":"flags: avx2","torch":"2.13.0"},'
        b'"packs":["d83f7b94797252e673325f607f7d00bd"],'
        b'"files":[["ab/kernel.so",4,"68719d4cd897164741572c37a2c862bb",0,0,12],'
        b'["fxgraph/k/v",5,"2ff6b5aa5891ca02a081f38473cb84ae",0,12,13]]}'
    )
    index = indices.parse(text, str(IndexName(3, 1, 2, KEY)))
    assert {file.path: unpack(whole, file, "pack") for file in index.files} == {
        "ab/kernel.so": b"\x7fELF",
        "fxgraph/k/v": b"graph",
    }
    assert index.facts == FACTS
    assert (
        environment_key(FACTS)
        == environment_key(dict(reversed(FACTS.items())))
        == "dc0e57c4e46310e5b608a8a04261952c"
    )


def test_every_fact_changes_the_key():
    here = directories.current_environment()
    key = directories.environment_key(here)
    assert len(key) == 32
    assert directories.environment_key(dict(reversed(here.items()))) == key
    for name in here:
        other = here | {name: "another"}
        assert directories.environment_key(other) != key
        assert directories.format_difference(here, other) == name
    assert {"torch", "python", "cpu", "compiler", "gpu", "cuda", "triton"} <= here.keys()


def test_the_environment_has_this_processor_and_compiler():
    here = directories.current_environment()
    if Path("/proc/cpuinfo").exists():
        assert here["cpu"]
    assert "+" in here["torch"] or "." in here["torch"]


def test_the_order_of_the_kernels_flags_does_not_matter():
    first = "vendor_id\t: X\nflags\t\t: fpu avx2 amx\n\nvendor_id\t: X\nflags\t\t: fpu avx2 amx\n"
    second = "flags : amx fpu avx2\nvendor_id : X\nbogomips : 12\n"
    assert directories._cpu(first) == directories._cpu(second) == "flags: amx avx2 fpu; vendor_id: X"
    assert directories._cpu(first) != directories._cpu(first.replace(" amx", ""))


def test_a_missing_or_silent_compiler_is_not_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    assert directories._compiler() == ""
    script = tmp_path / "c++"
    script.write_text("#!/bin/sh\necho 'c++ 99'\necho more\n")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", f"{script} -pipe")
    assert directories._compiler() == "c++ 99"


def test_gpus_come_from_the_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for number, model in enumerate(("NVIDIA H200", "NVIDIA H200", "NVIDIA T4")):
        folder = tmp_path / "nvidia" / f"0000:0{number}"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t {model}\nIRQ:   12\n")
    monkeypatch.setattr(directories, "_NVIDIA", tmp_path / "nvidia")
    monkeypatch.setattr(directories, "_AMD", tmp_path / "none")
    assert directories._gpus() == "NVIDIA H200, NVIDIA T4"
