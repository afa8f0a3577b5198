"""Image of the tests for real container runtimes, made of this machine's bash and busybox."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

import pytest

IMAGE = "localhost/holdfast-test-image:1"
_BUSYBOX = "/bin/busybox"
_CHANGES = ("ENV HOME=/srv/home", "ENV SETTING=of-the-image")


@functools.cache
def why_unavailable(runtime: str) -> str | None:
    """Return why a runtime cannot run containers of the image here, or None. Makes the image if necessary."""
    if shutil.which(runtime) is None:
        return f"{runtime} is not installed"
    if not os.access(_BUSYBOX, os.X_OK):
        return "busybox-static is not installed"
    if subprocess.run([runtime, "image", "inspect", IMAGE], capture_output=True, check=False).returncode:
        with tempfile.TemporaryDirectory() as folder:
            archive = Path(folder, "image.tar")
            _write(archive)
            changes = [word for change in _CHANGES for word in ("--change", change)]
            done = subprocess.run(
                [runtime, "import", *changes, str(archive), IMAGE],
                capture_output=True,
                text=True,
                check=False,
            )
        if done.returncode:
            return f"{runtime} cannot import an image: {done.stderr.strip()}"
    trial = [
        runtime,
        "run",
        "--rm",
        "--network",
        "host",
        "--pid",
        "host",
        IMAGE,
        "bash",
        "-c",
        "cat /srv/marker",
    ]
    done = subprocess.run(trial, capture_output=True, text=True, check=False)
    if done.returncode or done.stdout.strip() != IMAGE:
        return f"{runtime} cannot run containers: {done.stderr.strip()}"
    return None


def require(runtime: str) -> None:
    """Skip a test if a runtime cannot run containers here."""
    if why := why_unavailable(runtime):
        pytest.skip(why)


def _write(archive: Path) -> None:
    """Write the image's files to an archive."""
    bash = shutil.which("bash")
    assert bash is not None
    libraries = subprocess.run(["ldd", bash], capture_output=True, text=True, check=True).stdout
    with tempfile.TemporaryDirectory() as name, tarfile.open(archive, "w") as tar:
        root = Path(name)
        for folder in ("bin", "dev", "etc", "proc", "srv/home", "sys", "tmp", "usr/bin"):
            (root / folder).mkdir(parents=True)
        for path in (bash, *re.findall(r"(/\S+) \(", libraries)):
            to = root / (f"bin/{Path(path).name}" if path == bash else path[1:])
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, to)
        shutil.copy(_BUSYBOX, root / "bin" / "busybox")
        applets = subprocess.run([_BUSYBOX, "--list"], capture_output=True, text=True, check=True).stdout
        for applet in set(applets.split()) - {"busybox", "bash"}:
            (root / "bin" / applet).symlink_to("busybox")
        (root / "usr/bin/env").symlink_to("/bin/busybox")
        (root / "etc/passwd").write_text("root:x:0:0:root:/srv/home:/bin/bash\n")
        (root / "srv/marker").write_text(f"{IMAGE}\n")
        (root / "tmp").chmod(0o1777)
        tar.add(root, arcname=".", filter=_of_root)


def _of_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.mode |= 0o555 if entry.isdir() else 0o444
    return entry
