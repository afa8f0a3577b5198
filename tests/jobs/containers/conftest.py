"""Fixtures of jobs in images: the stand-in by default, podman and docker as slow tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.containers.images import IMAGE, require
from jobs.containers.runtimes import RealRuntime, RuntimeUnderTest
from jobs.containers.stand_in import StandIn
from jobs.harness import JobHarness, needs_namespaces, write_program

_REAL = [pytest.param(name, marks=pytest.mark.slow) for name in ("podman", "docker")]


@pytest.fixture(params=[pytest.param("stand-in", marks=needs_namespaces), *_REAL])
def runtime(request: pytest.FixtureRequest, harness: JobHarness) -> Iterator[RuntimeUnderTest]:
    """Return a runtime that is on the PATH of jobs, and check that they leave no container behind."""
    before = os.environ["PATH"]
    with pytest.MonkeyPatch.context() as patch:
        found: RuntimeUnderTest
        if request.param == "stand-in":
            found = StandIn(harness.folder / "runtime")
            found.add_image(IMAGE, HOME="/srv/home", SETTING="of-the-image")
            patch.setenv("PATH", f"{harness.folder / 'runtime'}:{before}")
        else:
            require(request.param)
            found = RealRuntime(request.param)
            patch.setenv("PATH", str(_only(harness.folder / "path", request.param, before)))
        yield found
        left = []
        for job in harness.engine.jobs():
            if job.status.is_final:
                harness.wait_for(job, lambda job=job: not harness.roles(job, "warden"), "the warden's end")
                left += found.containers(job)
            else:
                harness.cancel(job)
        assert not left, f"containers of jobs that have ended: {left}"


def _only(folder: Path, program: str, path: str) -> str:
    """Return a PATH on which podman exists only if it is the one under test."""
    if program == "podman":
        return path
    write_program(folder / "podman", "exit 1")
    return f"{folder}:{path}"


@pytest.fixture
def stand_in(harness: JobHarness, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Return a stand-in for podman without images, which is on the PATH of jobs."""
    monkeypatch.setenv("PATH", f"{harness.folder / 'runtime'}:{os.environ['PATH']}")
    return StandIn(harness.folder / "runtime")
