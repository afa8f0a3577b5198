"""Report of a run: a summary computed from its history, and a page that shows it."""

from holdfast.checkpoint.home.history import read_lines
from holdfast.watch.report.saves import HistoryEvent
from holdfast.watch.report.summary import RunSummary, read_summary, summarize

__all__ = ["HistoryEvent", "RunSummary", "read_lines", "read_summary", "summarize"]
