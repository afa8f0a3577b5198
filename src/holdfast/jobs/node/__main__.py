"""Internal entry point of a node's processes: `python -m holdfast.jobs.node ROLE FOLDER`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from holdfast.system.linux import locks


def main() -> None:
    """Run the process with the role of the first argument, which inherits a lock."""
    role, folder = sys.argv[1], Path(sys.argv[2])
    os.chdir("/")  # do not keep any directory busy
    locks.keep_inherited()
    if role == "agent":
        from holdfast.jobs.folder import NodeFolder
        from holdfast.jobs.node.agent import serve

        serve(NodeFolder(folder), replaces_controller=True)
    elif role == "mounter":
        from holdfast.jobs.node.mounts import mounter

        mounter.serve(folder)
    elif role == "warden":
        from holdfast.jobs.node.containers import warden

        warden.serve(folder)
    else:
        from holdfast.jobs.node.mounts import upload_watcher

        upload_watcher.serve(folder)


if __name__ == "__main__":
    main()
