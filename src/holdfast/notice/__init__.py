"""Preemption notices: signals, a file and the metadata of clouds, all turned into one word to ask for."""

from holdfast.notice.signals import SIGNALS
from holdfast.notice.watch import Notices
from holdfast.notice.word import Word

__all__ = ["SIGNALS", "Notices", "Word"]
