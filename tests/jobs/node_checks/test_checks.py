"""Checks of a node: what is sound passes with its numbers, and what is broken is named."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast.checkpoint.home.inventory import measure_space
from holdfast.jobs.journal import encode
from holdfast.jobs.node.checks import gate, gpu_script
from holdfast.jobs.node.checks.gate import (
    NUM_BYTES,
    NodeGate,
    Plan,
    check_disk,
    clock_offset_s,
    first_difference,
    make_plan,
)
from holdfast.jobs.node.checks.result import Check, NodeChecks, read_checks, read_mode
from holdfast.jobs.task.parser import parse_tasks
from small_disk import small_disk


def by_name(found: Iterator[Check]) -> dict[str, Check]:
    """Return results by name."""
    return {one.name: one for one in found}


def fill(ballast: Path) -> None:
    """Fill a disk."""
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))


def run(plan: Plan) -> NodeChecks:
    """Return the results of a gate."""
    return NodeGate("here", plan).wait(lambda: None)


def test_a_sound_disk_passes_and_nothing_is_left_on_it(tmp_path: Path) -> None:
    found = by_name(check_disk(tmp_path))
    assert found["disk"].trouble == ""
    assert found["disk"].values["written_bytes"] == NUM_BYTES
    assert found["disk"].values["write_s"] > 0
    assert found["clock"].trouble == ""
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_missing_or_no_folder_stops_the_attempt(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "missing", tmp_path / "file"):
        (found,) = check_disk(path)
        assert found.stops
        assert "cannot be written to" in found.trouble
    (found,) = check_disk(tmp_path / "missing", stops=False)
    assert found.trouble
    assert not found.stops


def test_a_full_or_read_only_disk_stops_the_attempt(tmp_path: Path) -> None:
    with small_disk(tmp_path, "600k") as disk:
        assert by_name(check_disk(disk))["disk"].trouble == "", "little space is enough"
        fill(disk / "ballast")
        (found,) = check_disk(disk)
        assert found.stops
        assert "No space left" in found.trouble


def test_a_disk_that_returns_other_bytes_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv

    def flipped(fd: int, buffers: list[bytearray], offset: int) -> int:
        size = real(fd, buffers, offset)
        buffers[0][4097] ^= 1
        return size

    monkeypatch.setattr(os, "preadv", flipped)
    found = by_name(check_disk(tmp_path))["disk"]
    if "is_named" in found.values and not found.trouble:
        pytest.skip("this file system has no direct reads")
    assert found.is_wrong
    assert found.stops
    assert "from offset 4097 on" in found.trouble


@given(st.integers(0, 9000), st.binary(max_size=50), st.binary(max_size=50))
def test_the_first_difference_is_the_first(num_equal: int, one: bytes, other: bytes) -> None:
    one, other = bytes(num_equal) + one, bytes(num_equal) + other
    at = first_difference(one, other)
    if at is None:
        assert one == other
    else:
        assert one[:at] == other[:at]
        assert one[at : at + 1] != other[at : at + 1]


@given(st.floats(-1e6, 1e6), st.floats(0, 10), st.floats(0, 1))
def test_a_clock_within_the_write_has_no_offset(offset_s: float, took_s: float, share: float) -> None:
    before_s, after_s = 1e9, 1e9 + took_s
    found = clock_offset_s(before_s + share * took_s + offset_s, before_s, after_s)
    assert abs(found) <= abs(offset_s) + 1e-6
    if abs(offset_s) > took_s:
        assert abs(found) >= abs(offset_s) - took_s - 1e-6


def test_a_clock_that_is_off_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 60)
    found = by_name(check_disk(tmp_path))["clock"]
    assert "this machine's clock is 60 s behind that of the file system" in found.trouble
    assert not found.stops


def test_memory_is_copied_and_too_little_is_named() -> None:
    found = by_name(gate.check_memory())
    assert found["copy"].trouble == found["memory"].trouble == ""
    assert found["copy"].values["copy_s"] > 0
    short = gate.check_free_memory(1 << 30, 1 << 60)
    assert "staging the next save takes" in short.trouble
    assert not short.stops


def test_a_copy_that_differs_is_wrong() -> None:
    copy = bytearray(1000)
    copy[10] = 4
    found = gate.compare_copy(bytes(1000), copy, {})
    assert found.is_wrong
    assert "from byte 10 on" in found.trouble


def test_products_are_right_on_every_core() -> None:
    pytest.importorskip("numpy")
    (found,) = gate.check_products()
    assert found.trouble == ""
    assert found.values["cores"] == len(os.sched_getaffinity(0))


def test_without_numpy_there_is_no_check_of_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert list(gate.check_products()) == []


@pytest.mark.parametrize("dtype", sorted(gate.GREATEST))
def test_a_product_with_one_wrong_bit_is_found(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    numpy = pytest.importorskip("numpy")
    real = numpy.matmul

    def flipped(left: Any, right: Any) -> Any:
        product = real(left, right)
        product.view("uint8").reshape(-1)[1000 * product.itemsize] ^= 1
        return product

    monkeypatch.setattr(numpy, "matmul", flipped)
    products = gate.numpy_products()
    assert products is not None
    (found,) = gate.check_products({dtype: products[dtype]})
    assert found.is_wrong
    assert found.stops
    assert dtype in found.trouble


def test_the_script_for_gpus_finds_a_wrong_product(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.equal
    monkeypatch.setattr(torch, "equal", lambda one, other: real(one, other + (one.shape == (256, 256))))
    found = gpu_script.check_device(torch, torch.device("cpu"))
    assert found["is_wrong"]
    assert found["trouble"] == "wrong results: float64, float32, bfloat16"


def save(home: Path) -> None:
    """Make a home with a checkpoint of about 800 kB."""
    with holdfast.Checkpointer(home, {"weight": torch.zeros(200_000)}, every=1) as ckpt:
        ckpt.save(1).wait_durable()


def test_the_next_save_is_compared_with_the_free_space(tmp_path: Path) -> None:
    with small_disk(tmp_path, "2m") as disk:
        home = disk / "home"
        save(home)
        found = measure_space(str(home))
        assert found is not None
        assert 800_000 < found.needed_bytes < 900_000
        assert found.trouble == ""
        (disk / "ballast").write_bytes(bytes(found.free_bytes - 700_000))
        found = measure_space(str(home))
        assert found is not None
        assert found.trouble.startswith("the next save does not fit: the newest checkpoint has 8")
        checks = run(make_plan(tmp_path, tmp_path, (str(home),))).checks
        (space,) = [one for one in checks if one.name == "space"]
        assert space.stops
        assert space.trouble == found.trouble


def test_other_homes_have_no_space_to_compare(tmp_path: Path) -> None:
    for place in ("s3://bucket/home", str(tmp_path / "missing"), str(tmp_path)):
        assert measure_space(place) is None


def test_all_checks_of_a_sound_machine_pass(tmp_path: Path) -> None:
    found = run(make_plan(tmp_path, Path("/tmp")))
    assert found.failed == ()
    needs_numpy = {"product"} if importlib.util.find_spec("numpy") else set[str]()
    assert {one.name for one in found.checks} == {"disk", "clock", "memory", "copy"} | needs_numpy


def test_a_check_that_hangs_costs_only_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "LIMIT_S", 0.5)

    def hang() -> Iterator[Check]:
        yield Check("clock", "x")
        signal.pause()

    found = run({"disk /dead": hang, "other": lambda: iter([Check("copy")])})
    assert found.failed == (Check("disk", "/dead", "no result within 0 s"),)
    assert {one.name for one in found.checks} == {"disk", "clock", "copy"}


def test_a_check_that_fails_is_a_result() -> None:
    def broken() -> Iterator[Check]:
        yield Check("copy")
        raise ValueError("x")

    def killed() -> Iterator[Check]:
        os.kill(os.getpid(), signal.SIGKILL)
        yield Check("copy")

    found = run({"a": broken, "b /x": killed})
    assert [(one.name, one.trouble) for one in found.failed] == [
        ("check", "ValueError: x"),
        ("a", "the check ended with status 1"),
        ("b", "the check ended with status -9"),
    ]


def test_a_command_for_gpus_is_part_of_the_gate() -> None:
    command = [sys.executable, gpu_script.__file__, "cpu"]
    found = run({"gpu": lambda: gate.become(command, os.environ)})
    assert [(one.name, one.where, one.trouble) for one in found.checks] == [("gpu", "cpu", "")]


text, flag = st.text(max_size=20), st.booleans()
values = st.dictionaries(st.text(max_size=5), st.floats(0, 1e12), max_size=3)
checks = st.builds(Check, st.sampled_from(["disk", "copy"]), text, text, flag, flag, values)


@given(st.lists(checks, max_size=4))
def test_results_are_read_back(tmp_path_factory: pytest.TempPathFactory, found: list[Check]) -> None:
    assert run({"disk": lambda: iter(found)}).checks == tuple(found)
    path = tmp_path_factory.mktemp("node") / "checks.json"
    document = NodeChecks("n1", 1e9, 0.5, 0.1, tuple(found), was_refused=True)
    path.write_text(encode(document))
    assert read_checks(path) == document


@given(st.binary(max_size=300))
def test_damaged_results_are_left_out(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("node") / "checks.json"
    path.write_bytes(data)
    assert read_checks(path) is None

    def results() -> Iterator[Check]:
        os.write(1, data + b"\n")
        yield Check("copy")

    assert run({"disk": results}).checks[-1] == Check("copy")


@pytest.mark.parametrize(
    ("text", "mode"),
    [(None, "stop"), ("", "stop"), ("REPORT ", "report"), ("off", "off"), ("False", "off"), ("x", None)],
)
def test_the_mode_is_a_word(text: str | None, mode: str | None) -> None:
    assert read_mode(text) == mode


def test_an_unquoted_off_of_a_task_file_is_the_word(tmp_path: Path) -> None:
    task = parse_tasks("envs: {HOLDFAST_NODE_CHECKS: off}\nrun: 'true'\n", str(tmp_path / "task.yaml")).only()
    assert read_mode(task.envs["HOLDFAST_NODE_CHECKS"]) == "off"
