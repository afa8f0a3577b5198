"""Contents of every tier over time."""

from __future__ import annotations

from holdfast.report.style import (
    BYTES_AXIS,
    KEPT,
    MAX_MARKS,
    ON_THE_WAY,
    Figure,
    Spec,
    color_by,
    format_size,
    format_time,
    make_chart,
    make_figure,
    time_axis,
    to_ms,
)
from holdfast.report.summary import RunSummary
from holdfast.report.tier_levels import tiers_in
from holdfast.units import plural

_COLOURS = {"memory": "var(--memory)", "local": ON_THE_WAY, "home": KEPT}
_DASHES: dict[str, list[int]] = {"memory": [2, 3], "local": [8, 4], "home": [1, 0]}
_TEXT = (
    "Bytes of complete checkpoints, from commits, drains and deletions. Deletions without an event, such as "
    "by `holdfast rm`, are not visible here."
)


def levels(summary: RunSummary) -> Figure | None:
    """Return the figure, or None if no tier had contents."""
    if not summary.levels or summary.last_unix_s is None:
        return None
    tiers = tiers_in(summary.levels)
    drawn = summary.levels[-MAX_MARKS:]
    values = [
        {
            "t": to_ms(level.unix_s),
            "bytes": level.num_bytes,
            "tier": level.tier,
            "what": f"{plural(level.num_checkpoints, 'checkpoint')}, {format_size(level.num_bytes)}",
        }
        for level in drawn
    ]
    last = {level.tier: level for level in drawn}
    end = to_ms(summary.end_unix_s or drawn[-1].unix_s)
    values += [
        {"t": end, "bytes": level.num_bytes, "tier": tier, "what": "at the end"}
        for tier, level in last.items()
    ]
    text = _TEXT
    if summary.home_contents is not None:
        held = (
            format_size(summary.home_contents.num_bytes)
            if summary.home_contents.num_checkpoints
            else "nothing"
        )
        text += f" At present home holds {held} (checkpoints: {summary.home_contents.num_checkpoints})."
    return make_figure(
        "levels",
        "How much each tier held",
        text,
        make_chart([_layer(summary, values, tiers)], height=200, legend_columns=3),
        ("time (UTC)", "tier", "checkpoints", "size"),
        [
            (format_time(one.unix_s), one.tier, one.num_checkpoints, format_size(one.num_bytes))
            for one in summary.levels
        ],
    )


def _layer(summary: RunSummary, values: list[Spec], tiers: list[str]) -> Spec:
    looks = {tier: _COLOURS.get(tier, "var(--ink)") for tier in tiers}
    dashes = {"domain": tiers, "range": [_DASHES.get(tier, [4, 2]) for tier in tiers]}
    return {
        "data": {"values": values},
        "mark": {"type": "line", "interpolate": "step-after", "strokeWidth": 1.5},
        "encoding": {
            "x": time_axis("t", summary),
            "y": {"field": "bytes", "type": "quantitative", "axis": {"title": None, "labelExpr": BYTES_AXIS}},
            "stroke": color_by("tier", looks),
            "strokeDash": {"field": "tier", "type": "nominal", "scale": dashes, "sort": tiers},
            "tooltip": [{"field": "tier"}, {"field": "what"}],
        },
    }
