"""Lines of a history are parsed into events, with any contents."""

from __future__ import annotations

import json
import os
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.format import names
from holdfast.checkpoint.home.history import read_lines
from holdfast.checkpoint.store import open_store
from holdfast.checkpoint.store.memory import MemoryStore
from holdfast.watch.report.events import HistoryEvent, parse_events

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
NAMES = ("step", "attempt", "rank", "tier", "bytes", "seconds", "detail")


def test_a_line_is_parsed_into_an_event() -> None:
    line = {"t": 2.5, "event": "drained", "step": 7, "attempt": 3, "rank": 1, "tier": "home"}
    made_up = HistoryEvent(2.5, "drained", 7, 3, 1, "home", 10, 0.5, "so")
    assert parse_events([{**line, "bytes": 10, "seconds": 0.5, "detail": "so"}]) == [made_up]


def test_a_line_without_a_tier_is_about_home() -> None:
    lines: list[dict[str, Any]] = [{"t": 1, "event": "saved"}, {"t": 2, "event": "saved", "tier": ""}]
    assert [event.tier for event in parse_events(lines)] == ["home", "home"]


@given(st.dictionaries(st.sampled_from(NAMES), json_values), st.floats(-1e12, 1e12))
def test_any_line_is_parsed_into_an_event_with_valid_numbers(members: dict[str, Any], t: float) -> None:
    (event,) = parse_events([{**members, "t": t, "event": "saved"}])
    assert event.num_bytes >= 0
    assert 0 <= event.seconds < float("inf")
    assert event.step is None or event.step >= 0
    assert isinstance(event.tier, str)


def test_lines_of_all_files_are_sorted_by_time_without_invalid_ones(tmp_path: Any) -> None:
    store = open_store(tmp_path)
    store.append("history/a0001-rank-00000.jsonl", b'{"t":3,"event":"b"}\n{"t":1,"event":"a"}\n')
    store.append(
        "history/a0001-rank-00001.jsonl", b'{"t":2,"event":"c"}\n{"t":NaN,"event":"d"}\n[[[\n{"t":true'
    )
    store.append("history/notes.txt", b'{"t":2,"event":"e"}\n')
    lines, num_torn = read_lines(store)
    assert [line["event"] for line in lines] == ["a", "c", "b"]
    assert num_torn == 3


@given(st.binary(max_size=200))
def test_any_bytes_can_be_read(text: bytes) -> None:
    store = MemoryStore("memory://history")
    store.put(
        "history/a0001-rank-00000.jsonl", json.dumps({"t": 1, "event": "saved"}).encode() + b"\n" + text
    )
    lines, _ = read_lines(store)
    assert lines
    assert parse_events(lines)


def test_a_path_that_is_not_utf_8_is_escaped() -> None:
    store = MemoryStore()
    path = os.fsdecode(b"runs/caf\xe9")
    line = {"t": 1.0, "event": "failed", "step": 3, "detail": f"no room in {path}", "tier": "home"}
    odd = {**line, "t": 2.0, "detail": "half \ud800"}
    text = "".join(json.dumps(one) + "\n" for one in (line, odd))
    store.append(names.history(1, 0), text.encode())
    lines, num_torn = read_lines(store)
    assert num_torn == 0
    assert [one["detail"] for one in lines] == [r"no room in runs/caf\xe9", r"half \ud800"]
    assert all(event.detail.isascii() for event in parse_events(lines))
