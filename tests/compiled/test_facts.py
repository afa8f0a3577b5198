"""Facts: what differs between machines makes another key, and is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.compiled import facts


def test_every_fact_is_part_of_the_key():
    here = facts.facts_of_machine()
    key = facts.key_of(here)
    assert len(key) == 32
    assert facts.key_of(dict(reversed(here.items()))) == key
    for name in here:
        other = here | {name: "another"}
        assert facts.key_of(other) != key
        assert facts.say_difference(here, other) == name
    assert {"torch", "python", "cpu", "compiler", "gpu", "cuda", "triton"} <= here.keys()


def test_this_processor_and_compiler_are_told():
    here = facts.facts_of_machine()
    if Path("/proc/cpuinfo").exists():
        assert here["cpu"]
    assert "+" in here["torch"] or "." in here["torch"]


def test_the_order_in_which_the_kernel_tells_flags_means_nothing():
    first = "vendor_id\t: X\nflags\t\t: fpu avx2 amx\n\nvendor_id\t: X\nflags\t\t: fpu avx2 amx\n"
    second = "flags : amx fpu avx2\nvendor_id : X\nbogomips : 12\n"
    assert facts._cpu(first) == facts._cpu(second) == "flags: amx avx2 fpu; vendor_id: X"
    assert facts._cpu(first) != facts._cpu(first.replace(" amx", ""))


def test_a_compiler_that_is_not_there_or_does_not_answer_is_no_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    assert facts._compiler() == ""
    script = tmp_path / "c++"
    script.write_text("#!/bin/sh\necho 'c++ 99'\necho more\n")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", f"{script} -pipe")
    assert facts._compiler() == "c++ 99"


def test_gpus_are_told_by_the_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for number, model in enumerate(("NVIDIA H200", "NVIDIA H200", "NVIDIA T4")):
        folder = tmp_path / "nvidia" / f"0000:0{number}"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t {model}\nIRQ:   12\n")
    monkeypatch.setattr(facts, "_NVIDIA", tmp_path / "nvidia")
    monkeypatch.setattr(facts, "_AMD", tmp_path / "none")
    assert facts._gpus() == "NVIDIA H200, NVIDIA T4"
