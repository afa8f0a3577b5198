"""Write-back directories: local files are uploaded in closing order. No torch."""

from holdfast.jobs.writeback.mount import Mount, mount, remove_uploaded
from holdfast.jobs.writeback.status import DirectoryStatus, status_of, wait_until_settled

__all__ = ["DirectoryStatus", "Mount", "mount", "remove_uploaded", "status_of", "wait_until_settled"]
