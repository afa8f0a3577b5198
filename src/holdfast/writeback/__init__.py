"""A local directory whose files go to a store in the order in which they were closed. No torch."""

from holdfast.writeback.mount import Mount, mount
from holdfast.writeback.status import Status, status_of, wait_until_settled

__all__ = ["Mount", "Status", "mount", "status_of", "wait_until_settled"]
