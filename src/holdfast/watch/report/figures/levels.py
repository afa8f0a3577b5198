"""Contents of every tier over time."""

from __future__ import annotations

from holdfast.system.units import plural
from holdfast.watch.report import style
from holdfast.watch.report.style import Figure, Spec
from holdfast.watch.report.summary import RunSummary
from holdfast.watch.report.tier_levels import tiers_in

_COLOURS = {"memory": "var(--memory)", "local": style.ON_THE_WAY, "home": style.KEPT}
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
    drawn = summary.levels[-style.MAX_MARKS :]
    values = [
        {
            "t": style.to_ms(level.unix_s),
            "bytes": level.num_bytes,
            "tier": level.tier,
            "what": f"{plural(level.num_checkpoints, 'checkpoint')}, {style.format_size(level.num_bytes)}",
        }
        for level in drawn
    ]
    last = {level.tier: level for level in drawn}
    end = style.to_ms(summary.end_unix_s or drawn[-1].unix_s)
    values += [
        {"t": end, "bytes": level.num_bytes, "tier": tier, "what": "at the end"}
        for tier, level in last.items()
    ]
    text = _TEXT
    if summary.home_contents is not None:
        held = (
            style.format_size(summary.home_contents.num_bytes)
            if summary.home_contents.num_checkpoints
            else "nothing"
        )
        text += f" At present home holds {held} (checkpoints: {summary.home_contents.num_checkpoints})."
    return style.make_figure(
        "levels",
        "Checkpoints in each tier",
        text,
        style.make_chart([_layer(summary, values, tiers)], height=200, legend_columns=3),
        ("time (UTC)", "tier", "checkpoints", "size"),
        [
            (style.format_time(one.unix_s), one.tier, one.num_checkpoints, style.format_size(one.num_bytes))
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
            "x": style.time_axis("t", summary),
            "y": {
                "field": "bytes",
                "type": "quantitative",
                "axis": {"title": None, "labelExpr": style.BYTES_AXIS},
            },
            "stroke": style.color_by("tier", looks),
            "strokeDash": {"field": "tier", "type": "nominal", "scale": dashes, "sort": tiers},
            "tooltip": [{"field": "tier"}, {"field": "what"}],
        },
    }
