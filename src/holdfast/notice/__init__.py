"""Preemption notices from signals, files and the metadata services of clouds."""

from holdfast.notice.preemption import Notice
from holdfast.notice.signals import SIGNALS
from holdfast.notice.watcher import NoticeWatcher

__all__ = ["SIGNALS", "Notice", "NoticeWatcher"]
