"""What came of each way: a table as the tutorial prints it, and a plot of losses and memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write(rows: list[dict[str, Any]], folder: Path) -> None:
    """Print the table; leave it as table.json, and the plot as plot.svg, in a folder."""
    heads = f"{'training loop':>14} {'test loss':>10} {'accuracy':>9}"
    print(f"{'way':16} {heads}  peak memory, parameters, per rank")
    for row in rows:
        peaks, kept = (" / ".join(f"{b / 1e6:.2f}" for b in row[key]) for key in ("peak_bytes", "kept_bytes"))
        numbers = f"{row['seconds']:>12.2f} s {row['loss']:>10.4f} {row['accuracy']:>9.1%}"
        print(f"{row['way']:16} {numbers}  {peaks} MB, {kept} MB", flush=True)
    (folder / "table.json").write_text(json.dumps(rows, indent=1) + "\n")
    try:
        import vl_convert
    except ImportError:
        print("no plot: pip install vl-convert-python", flush=True)
        return
    (folder / "plot.svg").write_text(vl_convert.vegalite_to_svg(_chart(rows)))
    print(f"{folder / 'table.json'} and {folder / 'plot.svg'}", flush=True)


def _chart(rows: list[dict[str, Any]]) -> dict[str, Any]:
    steps = [
        {"way": row["way"], "step": i, "loss": loss} for row in rows for i, loss in enumerate(row["curve"])
    ]
    ranks = [
        {"way": row["way"], "rank": rank, "MB": peak / 1e6}
        for row in rows
        for rank, peak in enumerate(row["peak_bytes"])
    ]
    way = {"field": "way", "type": "nominal", "sort": [row["way"] for row in rows], "title": None}
    losses = {
        "title": "Loss of each step",
        "width": 360,
        "height": 220,
        "data": {"values": steps},
        "mark": {"type": "line", "strokeWidth": 1.2, "opacity": 0.8},
        "encoding": {
            "x": {"field": "step", "type": "quantitative"},
            "y": {"field": "loss", "type": "quantitative", "title": None},
            "color": way,
        },
    }
    memory = {
        "title": "Peak memory of each rank, MB",
        "width": 300,
        "height": 220,
        "data": {"values": ranks},
        "mark": "bar",
        "encoding": {
            "x": way | {"axis": {"labelAngle": 0, "labelLimit": 90}},
            "xOffset": {"field": "rank"},
            "y": {"field": "MB", "type": "quantitative", "title": None},
            "color": way | {"legend": None},
        },
    }
    return {"$schema": "https://vega.github.io/schema/vega-lite/v5.json", "hconcat": [losses, memory]}
