"""BuildEnvironment: what differs between machines makes another key, and is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.watch.compiled import build_environment


def test_every_fact_changes_the_key():
    here = build_environment.current_environment()
    key = build_environment.environment_key(here)
    assert len(key) == 32
    assert build_environment.environment_key(dict(reversed(here.items()))) == key
    for name in here:
        other = here | {name: "another"}
        assert build_environment.environment_key(other) != key
        assert build_environment.format_difference(here, other) == name
    assert {"torch", "python", "cpu", "compiler", "gpu", "cuda", "triton"} <= here.keys()


def test_the_environment_has_this_processor_and_compiler():
    here = build_environment.current_environment()
    if Path("/proc/cpuinfo").exists():
        assert here["cpu"]
    assert "+" in here["torch"] or "." in here["torch"]


def test_the_order_of_the_kernels_flags_does_not_matter():
    first = "vendor_id\t: X\nflags\t\t: fpu avx2 amx\n\nvendor_id\t: X\nflags\t\t: fpu avx2 amx\n"
    second = "flags : amx fpu avx2\nvendor_id : X\nbogomips : 12\n"
    assert (
        build_environment._cpu(first) == build_environment._cpu(second) == "flags: amx avx2 fpu; vendor_id: X"
    )
    assert build_environment._cpu(first) != build_environment._cpu(first.replace(" amx", ""))


def test_a_missing_or_silent_compiler_is_not_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    assert build_environment._compiler() == ""
    script = tmp_path / "c++"
    script.write_text("#!/bin/sh\necho 'c++ 99'\necho more\n")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", f"{script} -pipe")
    assert build_environment._compiler() == "c++ 99"


def test_gpus_come_from_the_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for number, model in enumerate(("NVIDIA H200", "NVIDIA H200", "NVIDIA T4")):
        folder = tmp_path / "nvidia" / f"0000:0{number}"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t {model}\nIRQ:   12\n")
    monkeypatch.setattr(build_environment, "_NVIDIA", tmp_path / "nvidia")
    monkeypatch.setattr(build_environment, "_AMD", tmp_path / "none")
    assert build_environment._gpus() == "NVIDIA H200, NVIDIA T4"
