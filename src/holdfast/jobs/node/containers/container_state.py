"""State of a node's container, which its warden writes and the node's agent reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from holdfast.jobs.folder import ContainerFolder
from holdfast.system.documents import decode_dataclass
from holdfast.system.linux.files import write_atomic


@dataclass(frozen=True, slots=True)
class ContainerState:
    """Process that holds the namespaces of a container, or the reason why it cannot run."""

    pid: int = 0
    start: int = 0  # clock ticks since boot, to distinguish it from another process with this pid
    environment: Mapping[str, str] = field(default_factory=dict)  # of the image
    error: str = ""


def write_container_state(folder: ContainerFolder, state: ContainerState) -> None:
    """Write the state of a container."""
    write_atomic(folder.state, json.dumps(asdict(state)))


def read_container_state(folder: ContainerFolder) -> ContainerState | None:
    """Return the state of a container, or None if it is unknown yet."""
    try:
        data = folder.state.read_bytes()
    except FileNotFoundError:
        return None
    return decode_dataclass(ContainerState, data, str(folder.state), any_text=True)
