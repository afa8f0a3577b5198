"""The demo: a claim holds only if the outcome proves it."""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.store import open_store
from holdfast.cli import demo
from holdfast.cli.commands import add_command
from holdfast.cli.demo import hosts
from holdfast.cli.demo.claims import check_claims, find_recoveries
from holdfast.cli.demo.hosts import isolated
from holdfast.cli.demo.scenario import Damage, DemoOutcome, Start, flip_byte
from holdfast.errors import InvalidInput, Unsupported
from servers import ministack


def arguments(*words: str) -> argparse.Namespace:
    """Parse the options of a demo."""
    parser = argparse.ArgumentParser()
    add_command(parser.add_subparsers(), "demo")
    return parser.parse_args(["demo", *words])


def event(name: str, attempt: int, step: int, detail: str = "") -> dict[str, object]:
    """Return a line of a history."""
    facts = {"t": 1.0, "rank": 0, "bytes": 100, "seconds": 0.5}
    return {**facts, "event": name, "attempt": attempt, "step": step, "detail": detail}


@pytest.fixture
def outcome() -> DemoOutcome:
    """Return an outcome in which all claims hold."""
    told = "restored step 8; skipped step 10 of attempt 2: rank 0: it is damaged"
    more = {"output": [told], "first_step_s": 1.0}
    return DemoOutcome(
        steps=24,
        every=2,
        reference=Start("reference", 24, 0, "abc"),
        starts=[
            Start("survivor", 7, -9, None, "killed", 6, **more),
            Start("survivor", 11, -9, None, "killed again", **more),
            Start("survivor", 17, 75, None, "preempted", 16, **more),
            Start("survivor", 24, 0, "abc", **more),
        ],
        damage=Damage(10, 2, "step-00000010/rank-00000-a0002.safetensors", 50, 1, 254),
        done_step=24,
        events=[
            event("saved", 1, 6),
            event("persisted", 1, 6),
            event("committed", 1, 6),
            event("restored", 2, 6),
            event("restored", 3, 8, "skipped step 10 of attempt 2: rank 0: it is damaged"),
            event("restored", 4, 17),
        ],
        problems=[],
    )


def test_a_good_outcome_proves_every_claim(outcome: DemoOutcome) -> None:
    assert [claim.text for claim in check_claims(outcome) if not claim.holds] == []
    assert len(check_claims(outcome)) == 8


# For each deviation the number of the claim that fails, and the changed values by their path in the outcome.
SPOILT: dict[str, tuple[int, dict[str, object]]] = {
    "no kill": (0, {"starts.0.status": 0}),
    "not while saving": (0, {"starts.0.saving": None}),
    "staged save lost": (1, {"events.3.step": 4}),
    "no second kill": (2, {"starts.1.status": 1}),
    "no damage": (3, {"damage": Damage(10, 2, "x", 50, 1, 1)}),
    "damaged one restored": (3, {"events.4.step": 10}),
    "passed over without an event": (3, {"events.4.detail": ""}),
    "not printed to stderr": (3, {"starts.2.output": []}),
    "crashed instead of preempted": (4, {"starts.2.status": -15}),
    "preempted save lost": (4, {"events.5.step": 16}),
    "not done": (5, {"done_step": None}),
    "last is damaged": (6, {"problems": ["chunk 3"]}),
    "last is missing": (6, {"problems": None}),
    "other weights": (7, {"starts.3.sha256": "abd"}),
    "no weights": (7, {"reference.sha256": None, "starts.3.sha256": None}),
    "shorter reference": (7, {"reference.step": 23}),
}


@pytest.mark.parametrize(("number", "changes"), SPOILT.values(), ids=SPOILT)
def test_each_deviation_makes_its_claim_fail(
    outcome: DemoOutcome, number: int, changes: dict[str, object]
) -> None:
    assert check_claims(outcome)[number].holds
    for path, value in changes.items():
        *parts, name = path.split(".")
        owner: Any = outcome
        for part in parts:
            owner = owner[int(part)] if isinstance(owner, list) else getattr(owner, part)
        owner.update({name: value}) if isinstance(owner, dict) else setattr(owner, name, value)
    assert not check_claims(outcome)[number].holds


def test_recoveries_are_found_in_the_outcome(outcome: DemoOutcome) -> None:
    recoveries = list(find_recoveries(outcome))
    assert [recovery.steps_lost for recovery in recoveries] == [1, 3, 0]
    assert [recovery.passed_over for recovery in recoveries] == [False, True, False]
    assert [recovery.back_s for recovery in recoveries] == [1.0, 1.0, 1.0]


def test_a_flipped_byte_differs(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    damage = flip_byte(open_store(tmp_path), "file", step=1, attempt=1)
    assert (tmp_path / "file").read_bytes() == b"a" + bytes([ord("b") ^ 0xFF]) + b"c"
    assert (damage.offset, damage.before, damage.after) == (1, ord("b"), ord("b") ^ 0xFF)


@pytest.mark.parametrize("words", [("--steps", "10"), ("--size", "1MB"), ("--size", "much")])
def test_a_demo_that_is_too_small_is_rejected(words: tuple[str, ...]) -> None:
    with pytest.raises(InvalidInput, match="--s"):
        demo.run(arguments(*words))


def proven_demo(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[dict[str, Any], str]:
    """Run a demo that is smaller than the default. Return its JSON and stderr."""
    status = demo.run(arguments("--steps", "60", "--size", "25MB", "--json", *words))
    result = capsys.readouterr()
    document = json.loads(result.out)
    assert document["proven"], document["claims"]
    assert status == 0
    assert [recovery["status"] for recovery in document["figures"]["recoveries"]] == [-9, -9, 75]
    return document, result.err


@pytest.mark.slow
def test_demo_proves_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document, shown = proven_demo(capsys, "--home", str(tmp_path), "--keep")
    assert len(document["claims"]) == 8
    assert "skipped step" in shown
    home = Path(document["kept_in"]) / "survivor"
    assert home.parent.parent == tmp_path
    assert (home / "done.json").exists()
    newest = max(home.glob("step-*"))
    assert sum(file.stat().st_size for file in newest.iterdir()) > 20_000_000
    assert len(list((home / "attempts").glob("a[0-9][0-9][0-9][0-9].json"))) == 4


@pytest.mark.slow
def test_demo_proves_everything_with_only_a_bucket(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The home is in an S3 server, and each failure deletes the local folder."""
    with ministack() as server:
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        home = server.home("demos")
        _, shown = proven_demo(capsys, "--home", home)
        assert shown.count("the local folder is deleted") == 3
        assert list(open_store(home).list()) == [], "it tidies up"


def skip_without_namespaces() -> None:
    """Skip the test where this user may not make namespaces."""
    try:
        done = subprocess.run(isolated(["true"]), capture_output=True)
    except Unsupported as error:
        pytest.skip(str(error))
    assert done.returncode == 0


@pytest.mark.slow
def test_a_lost_host_costs_nothing_but_the_steps_since_its_last_copy(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without_namespaces()
    monkeypatch.delenv("HOLDFAST_KEEP_IN_MEMORY", raising=False)  # the suite sets it to 0
    assert demo.run(arguments("--hosts", "2", "--json", "--home", str(tmp_path))) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["proven"]
    assert (found["host"], found["source"]) == ("host2", "memory")
    assert found["restored"] >= found["mirrored"] >= 8
    assert list(tmp_path.iterdir()) == [], "nothing is left"


def test_without_the_programs_for_hosts_the_demo_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts.shutil, "which", lambda program: None if program == "ip" else f"/bin/{program}")
    with pytest.raises(Unsupported, match="programs of iproute2, which is not installed here"):
        demo.run(arguments("--hosts", "2"))


def test_where_namespaces_are_not_allowed_the_demo_gives_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = subprocess.CompletedProcess([], 1, "", "unshare: unshare failed: Operation not permitted\n")
    monkeypatch.setattr(hosts.subprocess, "run", lambda *_, **__: refused)
    with pytest.raises(Unsupported, match=r"Operation not permitted\. Run as root, or allow"):
        hosts.isolated(["true"])


def test_a_host_alone_has_no_peers() -> None:
    with pytest.raises(InvalidInput, match="--hosts must be between 2 and 16; got 1"):
        demo.run(arguments("--hosts", "1"))
