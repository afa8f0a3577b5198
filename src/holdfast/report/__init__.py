"""The story of a run, computed from its history, and a page that shows it."""

from holdfast.report.events import Event, read_lines
from holdfast.report.story import Story, read_story, tell

__all__ = ["Event", "Story", "read_lines", "read_story", "tell"]
