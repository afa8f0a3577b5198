"""Preemption notices from signals, files and the metadata services of clouds."""

from holdfast.watch.preemption.notice import Notice
from holdfast.watch.preemption.signals import SIGNALS
from holdfast.watch.preemption.watcher import NoticeWatcher

__all__ = ["SIGNALS", "Notice", "NoticeWatcher"]
