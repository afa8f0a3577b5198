"""Differences of a restored state from the checkpoint: shown at the user's line, once, for all ranks."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.errors import ResumeWarning
from stage.ranks import run_ranks
from stage.training import make_checkpointer


def _net(*, is_tied: bool, dtype: torch.dtype) -> nn.Module:
    net = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(2))).to(dtype)
    if is_tied:
        net[1].weight = net[0].weight
    return net


def _save(home: Path, state: dict[str, Any]) -> None:
    with make_checkpointer(home, state) as ckpt:
        ckpt.save(1)


def _warnings_of(action: Callable[[], Any]) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [one for one in caught if issubclass(one.category, ResumeWarning)]


def _lines(one: Any) -> list[str]:
    """The lines of a warning about differences, without its first one."""
    first, *lines = str(getattr(one, "message", one)).split("\n  ")
    assert "differs from the checkpoint of step 1" in first
    return lines


def _restore(home: Path, state: dict[str, Any], **options: Any) -> list[str]:
    """The lines of the warning of a restore."""
    with make_checkpointer(home, state) as ckpt:
        (one,) = _warnings_of(lambda: ckpt.restore(**options))
    assert one.filename == __file__
    return _lines(one)


def test_casts_and_merged_tensors_are_warned_of(tmp_path: Path) -> None:
    _save(tmp_path, {"m": _net(is_tied=False, dtype=torch.float64)})
    assert _restore(tmp_path, {"m": _net(is_tied=True, dtype=torch.bfloat16)}) == [
        "m.0.weight, m.1.weight: saved as torch.float64, cast to torch.bfloat16.",
        "m.1.weight: it shares memory with another live tensor, but was saved with other values; the "
        "later name wins.",
    ]


def test_a_restore_that_fits_is_silent(tmp_path: Path) -> None:
    _save(tmp_path, {"m": _net(is_tied=True, dtype=torch.float64)})
    with make_checkpointer(tmp_path, {"m": _net(is_tied=True, dtype=torch.float64)}) as ckpt:
        assert not _warnings_of(ckpt.restore)


def test_many_differences_are_few_lines(tmp_path: Path) -> None:
    """Alike ones share a line; of the others the first five are shown."""
    floats = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
    kinds = [*floats, torch.int64, torch.int32, torch.int16]
    saved = {f"{kind}"[6:]: torch.ones(1, dtype=kind) for kind in kinds}
    _save(tmp_path, {**saved, **{f"more{i}": torch.ones(1, dtype=torch.int16) for i in range(4)}})
    live = {key: torch.zeros(1, dtype=torch.uint8) for key in [*saved, *(f"more{i}" for i in range(4))]}
    lines = _restore(tmp_path, live)
    assert lines[0] == "float64: saved as torch.float64, cast to torch.uint8."
    assert (len(lines), lines[-1]) == (6, "and 2 more")
    again = {key: torch.zeros(1, dtype=saved.get(key, live[key]).dtype) for key in live}
    assert _restore(tmp_path, again) == [
        "more0, more1, more2 and 1 more: saved as torch.int16, cast to torch.uint8."
    ]


@dataclass
class Place:
    """A value that has a class of the program."""

    name: str


def test_what_strict_false_leaves_out_is_warned_of(tmp_path: Path) -> None:
    """Values of another type, names that only the state has, and names that only the checkpoint has."""
    _save(tmp_path, {"it": Place("here"), "old": torch.ones(1), "x": torch.ones(1)})
    state = {"it": {"a": 2}, "new": torch.zeros(1), "x": torch.zeros(1)}
    kept, missing, left_out = _restore(tmp_path, state, strict=False)
    assert "Place, but the live state holds a builtins.dict there." in kept
    assert kept.endswith("The live value stays (strict=False).")
    assert "Nothing was changed" not in kept
    assert missing == "1 name in the live state but not in the checkpoint, left unchanged: new."
    assert left_out == "1 name in the checkpoint but not in the live state, not restored: old."
    assert state["it"] == {"a": 2}


def test_the_history_has_the_differences(tmp_path: Path) -> None:
    """Also of a restore before the claim."""
    _save(tmp_path, {"m": _net(is_tied=False, dtype=torch.float64)})
    with make_checkpointer(tmp_path, {"m": _net(is_tied=False, dtype=torch.float32)}) as ckpt:
        with pytest.warns(ResumeWarning, match="cast to"):
            ckpt.restore()
        ckpt.save(2)
    texts = [path.read_text() for path in (tmp_path / "history").iterdir()]
    events = [json.loads(line) for text in texts for line in text.splitlines()]
    (detail,) = [one["detail"] for one in events if one["event"] == "restored"]
    assert detail == "attempt 1; m.0.weight, m.1.weight: saved as torch.float64, cast to torch.float32"


def test_a_loop_that_restores_again_does_not_repeat_them(tmp_path: Path) -> None:
    _save(tmp_path, {"t": torch.ones(1, dtype=torch.float64)})
    with make_checkpointer(tmp_path, {"t": torch.zeros(1)}, every=9) as ckpt:

        def start() -> None:
            ckpt.restore()
            assert next(iter(ckpt.steps(3))) == 1

        (one,) = _warnings_of(start)
    assert _lines(one) == ["t: saved as torch.float64, cast to torch.float32."]


def test_names_that_a_load_leaves_out_are_logged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The objects of one load are often a part of the checkpoint."""
    with make_checkpointer(tmp_path, None) as ckpt:
        ckpt.save(1, {"t": torch.ones(1), "rest": torch.ones(1)})
    with make_checkpointer(tmp_path, None, quiet=False) as ckpt:
        assert not _warnings_of(lambda: ckpt.load(into={"t": torch.zeros(1)}, strict=False))
    assert (
        "1 name in the checkpoint but not in the live state, not restored: rest." in capsys.readouterr().err
    )


# -- several ranks -------------------------------------------------------------------------------------------


class _Lines(logging.Handler):
    """The lines of a log."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _cast_on_ranks(rank: int, home: Path) -> tuple[list[list[str]], list[str]]:
    """The warnings and log lines of a rank. All cast one tensor, and ranks above 0 another."""
    log = _Lines()
    logging.getLogger("holdfast").addHandler(log)
    others = torch.float32 if rank else torch.float64
    state = {"all": torch.zeros(1), "some": torch.zeros(1, dtype=others)}
    with make_checkpointer(home, state, quiet=False) as ckpt:
        found = _warnings_of(ckpt.restore)
    return [_lines(one) for one in found], [line for line in log.lines if line.startswith("rng:")]


def test_rank_0_reports_for_all_ranks(tmp_path: Path) -> None:
    """Seeds of generators are a line of the log: new ones are expected on another number of ranks."""
    _save(tmp_path, {"all": torch.ones(1, dtype=torch.float64), "some": torch.ones(1, dtype=torch.float64)})
    (first, seeds), *rest = run_ranks(3, _cast_on_ranks, tmp_path)
    assert first == [
        [
            "all: saved as torch.float64, cast to torch.float32.",
            "rank 1: all, some: saved as torch.float64, cast to torch.float32.",
        ]
    ]
    assert rest == [([], []), ([], [])]
    (seeded,) = seeds
    assert "generators were seeded with" in seeded
