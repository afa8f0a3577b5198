"""Library that draws the charts, as one script for a browser."""

from __future__ import annotations

from functools import cache

from holdfast.errors import Unsupported

_NOT_THERE = (
    "The report page needs a chart library: pip install 'torch-holdfast[report]'. "
    "`holdfast report HOME --json` does not need it."
)


def chart_library() -> str:
    """Return Vega, Vega-Lite and vega-embed as one script, which defines `vegaEmbed`.

    Raises:
        Unsupported: they are not installed.
    """
    try:
        import vl_convert  # noqa: F401 - needed for pages only
    except ImportError as error:
        raise Unsupported(_NOT_THERE) from error
    return _bundled()


@cache
def _bundled() -> str:
    import vl_convert

    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")  # takes a second
