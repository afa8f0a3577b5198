"""The timeline: when training counted, was done again, was down or restoring; what saves did meanwhile."""

from __future__ import annotations

from holdfast.report.events import HOME
from holdfast.report.look import (
    BAD,
    BLOCKED,
    DOWN,
    INK,
    KEPT,
    ON_THE_WAY,
    REDO,
    RESTORE,
    Figure,
    Spec,
    chart,
    figure,
    moment,
    ms,
    seconds,
    size,
    thinned,
    time_axis,
    told_apart,
)
from holdfast.report.saves import Save
from holdfast.report.spans import Span
from holdfast.report.story import Story, kept_spans

_MAX_LABELS = 12  # of attempts; more would lie over each other
_LANES = {
    "kept": KEPT,
    "done again": REDO,
    "down": DOWN,
    "restoring": RESTORE,
    "save()": BLOCKED,
    "to memory": ON_THE_WAY,
    "to local": ON_THE_WAY,
    "to home": ON_THE_WAY,
    "draining": ON_THE_WAY,
    "trouble": BAD,
}
_TEXT = (
    "Each row is one kind of time. Kept: training whose result stands. Done again: training that an "
    "interruption threw away. Down: from the last sign of an attempt to the claim of the next one, which "
    "holds steps that nobody saw, the outage, and the start of the processes. Restoring: until training "
    "went again. save(): what saving took from the training loop. To home: a save on its way until it was "
    "durable. Trouble: saves that failed or were skipped or dropped, and deletions that failed. Dashed "
    "lines are starts of attempts."
)


def timeline(story: Story) -> Figure | None:
    """The figure; None if nothing has happened."""
    if story.began_unix_s is None:
        return None
    saves, every = thinned(story.saves)
    bars = _training(story) + _saving(saves) + _drains(story)
    trouble = [
        {"lane": "trouble", "from": ms(event.unix_s), "what": f"{event.kind}: {event.detail[:200]}"}
        for event in story.trouble[-1000:]
    ]
    used = {bar["lane"] for bar in bars} | {one["lane"] for one in trouble}
    lanes = {lane: look for lane, look in _LANES.items() if lane in used}
    text = _TEXT if every == 1 else f"{_TEXT} Of the saves, one of every {every} is drawn."
    return figure(
        "timeline",
        "What happened when",
        text,
        chart(_layers(story, lanes, bars, trouble), height=26 * len(lanes)),
        ("time (UTC)", "attempt", "what", "step", "took", "detail"),
        _rows(story),
    )


def _layers(story: Story, lanes: dict[str, str], bars: list[Spec], trouble: list[Spec]) -> list[Spec]:
    row = {
        "field": "lane",
        "type": "nominal",
        "scale": {"domain": list(lanes)},
        "sort": list(lanes),
        "axis": {"title": None, "grid": True, "bandPosition": 0.5, "labelFontSize": 13, "ticks": False},
    }
    tooltip = [{"field": "what", "title": "what"}, {"field": "took", "title": "took"}]
    starts = [
        {"from": ms(life.began_unix_s), "what": f"attempt {life.number}", "label": str(life.number)}
        for life in story.lives
    ]
    x = time_axis("from", story, grid=False)
    layers: list[Spec] = [
        {
            "data": {"values": starts},
            "mark": {"type": "rule", "strokeDash": [3, 3], "stroke": INK, "opacity": 0.6},
            "encoding": {"x": x, "tooltip": [{"field": "what", "title": "start"}]},
        },
        {
            "data": {"values": bars},
            "mark": {"type": "bar", "height": {"band": 0.62}, "strokeWidth": 1},
            "encoding": {
                # Given again beside an x2, the same domain is taken for another one.
                "x": {**x, "scale": {"type": "utc", "nice": False}},
                "x2": {"field": "to"},
                "y": row,
                "fill": told_apart("lane", lanes, legend=False),
                "stroke": told_apart(
                    "lane", {lane: _line_of(look) for lane, look in lanes.items()}, legend=False
                ),
                "tooltip": tooltip,
            },
        },
    ]
    if trouble:
        mark = {"type": "point", "shape": "cross", "size": 90, "angle": 45, "filled": True, "fill": BAD}
        encoding = {"x": x, "y": row, "tooltip": tooltip[:1]}
        layers.append({"data": {"values": trouble}, "mark": mark, "encoding": encoding})
    if len(starts) <= _MAX_LABELS:
        mark = {"type": "text", "align": "left", "dx": 3, "dy": -6, "y": 0}
        encoding = {"x": x, "text": {"field": "label"}}
        layers.append({"data": {"values": starts}, "mark": mark, "encoding": encoding})
    return layers


def _line_of(fill: str) -> str:
    """The plain colour around a fill."""
    return {REDO: "var(--redo)", DOWN: "var(--down)"}.get(fill, fill)


def _training(story: Story) -> list[Spec]:
    losses = story.losses
    lanes = {
        "kept": kept_spans(story),
        "done again": losses.redone,
        "down": losses.down,
        "restoring": losses.restoring,
    }
    return [_bar(lane, span, lane) for lane, spans in lanes.items() for span in spans]


def _saving(saves: list[Save]) -> list[Spec]:
    bars: list[Spec] = []
    for save in saves:
        what = f"step {save.step}, attempt {save.attempt}, {size(save.num_bytes)}"
        if save.back_unix_s is not None:
            bars.append(_bar("save()", (save.back_unix_s - (save.blocked_s or 0.0), save.back_unix_s), what))
        bars += [
            _bar(f"to {copy.tier}", (save.began_unix_s, copy.durable_unix_s), what)
            for copy in save.copies
            if copy.durable_unix_s is not None and not copy.was_drained and f"to {copy.tier}" in _LANES
        ]
    return bars


def _drains(story: Story) -> list[Spec]:
    drains, _ = thinned(story.drains)
    return [
        _bar("draining", (one.unix_s - one.seconds, one.unix_s), f"step {one.step}, {size(one.num_bytes)}")
        for one in drains
    ]


def _bar(lane: str, span: Span, what: str) -> Spec:
    return {
        "lane": lane,
        "from": ms(span[0]),
        "to": ms(span[1]),
        "what": what,
        "took": seconds(span[1] - span[0]),
    }


def _rows(story: Story) -> list[tuple[str | int | None, ...]]:
    rows: list[tuple[float, tuple[str | int | None, ...]]] = []
    for life in story.lives:
        where = "from nothing" if life.restored_step is None else f"from step {life.restored_step}"
        what = f"started {where}" if life.has_trained else "started, and left no other trace"
        took = seconds(life.restore_s) if life.restore_s else None
        detail = life.remark or (f"on {life.host}" if life.host else None)
        row = (moment(life.began_unix_s), life.number, what, life.restored_step, took, detail)
        rows.append((life.began_unix_s, row))
    for one in story.interruptions:
        detail = one.end or f"{seconds(one.cost_s)} lost"
        row = (
            moment(one.last_seen_unix_s),
            one.before,
            f"last sign ({one.kind})",
            one.last_step,
            None,
            detail,
        )
        rows.append((one.last_seen_unix_s, row))
    for event in (*story.trouble, *story.drains):
        took = seconds(event.seconds) if event.seconds else None
        row = (moment(event.unix_s), event.attempt, event.kind, event.step, took, event.detail)
        rows.append((event.unix_s, row))
    for save in story.saves:
        copy = next((copy for copy in save.copies if copy.tier == HOME), None)
        took = seconds(copy.durable_s) if copy and copy.durable_s is not None else None
        what = "saved" if save.durable else f"save {save.outcome}"
        rows.append(
            (save.began_unix_s, (moment(save.began_unix_s), save.attempt, what, save.step, took, save.detail))
        )
    return [row for _, row in sorted(rows, key=lambda pair: pair[0])]
