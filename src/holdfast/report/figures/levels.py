"""How much every tier held over time."""

from __future__ import annotations

from holdfast.quantity import plural
from holdfast.report.look import (
    BYTES_AXIS,
    KEPT,
    MAX_MARKS,
    ON_THE_WAY,
    Figure,
    Spec,
    chart,
    figure,
    moment,
    ms,
    size,
    time_axis,
    told_apart,
)
from holdfast.report.story import Story
from holdfast.report.tiers import tiers_in

_COLOURS = {"memory": "var(--memory)", "local": ON_THE_WAY, "home": KEPT}
_DASHES: dict[str, list[int]] = {"memory": [2, 3], "local": [8, 4], "home": [1, 0]}
_TEXT = (
    "Bytes of complete checkpoints, from commits, drains and deletions. Deletions that no event tells of, "
    "such as by `holdfast rm`, are not seen here."
)


def levels(story: Story) -> Figure | None:
    """The figure; None if no tier held anything."""
    if not story.levels or story.last_unix_s is None:
        return None
    tiers = tiers_in(story.levels)
    drawn = story.levels[-MAX_MARKS:]
    values = [
        {
            "t": ms(level.unix_s),
            "bytes": level.num_bytes,
            "tier": level.tier,
            "what": f"{plural(level.num_checkpoints, 'checkpoint')}, {size(level.num_bytes)}",
        }
        for level in drawn
    ]
    last = {level.tier: level for level in drawn}
    end = ms(story.end_unix_s or drawn[-1].unix_s)
    values += [
        {"t": end, "bytes": level.num_bytes, "tier": tier, "what": "at the end"}
        for tier, level in last.items()
    ]
    text = _TEXT
    if story.holding is not None:
        held = size(story.holding.num_bytes) if story.holding.num_checkpoints else "nothing"
        text += f" Now home holds {held} (checkpoints: {story.holding.num_checkpoints})."
    return figure(
        "levels",
        "How much each tier held",
        text,
        chart([_layer(story, values, tiers)], height=200, legend_columns=3),
        ("time (UTC)", "tier", "checkpoints", "size"),
        [(moment(one.unix_s), one.tier, one.num_checkpoints, size(one.num_bytes)) for one in story.levels],
    )


def _layer(story: Story, values: list[Spec], tiers: list[str]) -> Spec:
    looks = {tier: _COLOURS.get(tier, "var(--ink)") for tier in tiers}
    dashes = {"domain": tiers, "range": [_DASHES.get(tier, [4, 2]) for tier in tiers]}
    return {
        "data": {"values": values},
        "mark": {"type": "line", "interpolate": "step-after", "strokeWidth": 1.5},
        "encoding": {
            "x": time_axis("t", story),
            "y": {"field": "bytes", "type": "quantitative", "axis": {"title": None, "labelExpr": BYTES_AXIS}},
            "stroke": told_apart("tier", looks),
            "strokeDash": {"field": "tier", "type": "nominal", "scale": dashes, "sort": tiers},
            "tooltip": [{"field": "tier"}, {"field": "what"}],
        },
    }
