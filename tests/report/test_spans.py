"""Overlapping time spans are counted once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.watch.report.interruptions import Spans, seconds_of

whole_spans = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=12)


@given(whole_spans)
def test_spans_match_a_set_of_seconds(
    spans: list[tuple[int, int]],
) -> None:
    ticked: set[int] = set()
    held = Spans()
    for begin, end in spans:
        seconds = set(range(begin, end))
        new = held.add(begin, end)
        assert {s for left, right in new for s in range(int(left), int(right))} == seconds - ticked
        assert seconds_of(new) == len(seconds - ticked)
        ticked |= seconds
        assert seconds_of(held.stretches) == len(ticked)
        assert seconds_of(spans) == sum(any(b <= s < e for b, e in spans) for s in range(31))
    assert all(held.contains(second + 0.5) == (second in ticked) for second in range(31))


@given(whole_spans)
def test_stretches_stay_in_order_and_do_not_touch(spans: list[tuple[int, int]]) -> None:
    held = Spans()
    for span in spans:
        held.add(*span)
    edges = [edge for stretch in held.stretches for edge in stretch]
    assert edges == sorted(set(edges))
