"""A home in which one object is no whole file: no command hangs, writes outside, or prints raw escapes."""

from __future__ import annotations

import pytest

from campaigns.fuzz.hostile import KINDS, Case, matrix, run, warm_up
from campaigns.fuzz.targets import home_documents

FOLDERS = ("strange names", "many names", "deep folders")  # made in folders only
FEW = [
    Case(command, name, kind)
    for command in ("ls", "verify", "drain", "restore")
    for name, kind in (("holdfast.json", "FIFO"), (".", "FIFO"), ("history", "link to a folder"))
] + [
    Case("restore", ".", "link to itself"),
    *(Case("ls", "step-00000030/manifest-a0002.json", kind) for kind in KINDS if kind not in FOLDERS),
]


@pytest.mark.parametrize("case", FEW, ids=str)
def test_no_command_fails_on_a_few_hostile_homes(case: Case) -> None:
    failure = run(case, home_documents())
    assert failure is None, failure.text


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_command_fails_on_any_hostile_home(kind: str) -> None:
    home = home_documents()
    warm_up(home)
    found = [(case, run(case, home)) for case in matrix(home) if case.kind == kind]
    failures = [f"{case}: {failure.kind} at {failure.place}" for case, failure in found if failure]
    assert not failures, "\n".join(failures)
