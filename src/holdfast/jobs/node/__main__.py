"""Entry of the processes of a node: `python -m holdfast.jobs.node ROLE FOLDER`; not for people."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from holdfast.jobs.node import locks


def main() -> None:
    """Be what the first argument says, for the folder that the second names; its lock was handed to us."""
    role, folder = sys.argv[1], Path(sys.argv[2])
    os.chdir("/")  # hold nobody's directory
    locks.keep_handed()
    if role == "warden":
        from holdfast.jobs.node.folder import NodeFolder
        from holdfast.jobs.node.warden import serve

        serve(NodeFolder(folder), replaces_controller=True)
    elif role == "porter":
        from holdfast.jobs.node.mounts import porter

        porter.serve(folder)
    else:
        from holdfast.jobs.node.mounts import drainer

        drainer.serve(folder)


if __name__ == "__main__":
    main()
