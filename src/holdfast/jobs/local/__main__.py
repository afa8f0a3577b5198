"""Entry of the processes of local jobs: `python -m holdfast.jobs.local ROLE FOLDER`; not for people."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from holdfast.jobs.local import locks


def main() -> None:
    """Be what the first argument says, for the folder that the second names; its lock was handed to us."""
    role, folder = sys.argv[1], Path(sys.argv[2])
    os.chdir("/")  # hold nobody's directory
    locks.keep_handed()
    if role == "warden":
        from holdfast.jobs.local.folder import NodeFolder
        from holdfast.jobs.local.warden import serve

        serve(NodeFolder(folder), replaces_controller=True)
    elif role == "porter":
        from holdfast.jobs.local.mounts import porter

        porter.serve(folder)
    elif role == "drainer":
        from holdfast.jobs.local.mounts import drainer

        drainer.serve(folder)
    else:
        from holdfast.jobs.local.controller import look_after

        look_after(folder.parents[1], int(folder.name))


if __name__ == "__main__":
    main()
