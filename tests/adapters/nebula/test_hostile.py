"""Files and messages of other users of a machine never run as code."""

from __future__ import annotations

import base64
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] - its documented place

from holdfast.adapters.kit.store_ranks import StoreRanks
from holdfast.checkpoint.format.messages import pack, unpack
from holdfast.errors import Corrupt, HoldfastError, MissingKey, NotFound, RetryLater, TimedOut
from nursery import shared


class _Bomb:
    """Object whose pickle runs a command when it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.mark),))


def test_values_in_the_store_are_not_unpickled(tmp_path: Path) -> None:
    """Any process that reaches the port of torch's TCPStore can write to it."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stranger = TCPStore("127.0.0.1", server.port, is_master=False)
    ranks = StoreRanks(server, "holdfast/nebula/x", (0, 1), 0, timeout_s=20)
    bomb = pickle.dumps(_Bomb(tmp_path / "ran"))
    stranger.set("holdfast/nebula/x/0/1", base64.b64encode(bomb).decode())
    with pytest.raises(Corrupt, match="message from rank 1 is not Holdfast's"):
        ranks.gather("mine")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "value",
    [
        None,
        (1, "two", [3.5, None], {"a": (1, 2)}),
        ((("run", 3), None), b"\0\xff", float("inf"), 2**70),
        (None, RetryLater("not now", step=3, rank=1)),
        (None, TimedOut("not now", step=3, rank=1)),
        (None, NotFound("not now", step=3, rank=1)),
        (None, MissingKey("not now", step=3, rank=1)),
        {1: {"x"}, "$odd": ()},
    ],
)
def test_messages_round_trip(value: Any) -> None:
    found = unpack(pack(value), "rank 1")
    if isinstance(value, tuple) and isinstance(value[-1], HoldfastError):
        assert (type(found[1]), str(found[1]), found[1].step) == (type(value[1]), "not now", 3)
    else:
        assert found == value


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b'{"value":1,"tuple":[]}',
        b'{"error":[1]}',
        b'{"error":["none","x",null,null,null]}',
        b'{"value":{"$none":1}}',
        b'{"value":{"$int":"' + b"9" * 5000 + b'"}}',
        b'{"value":' + b"[" * 100_000,
        b'{"tuple":[' * 50_000,
        b'{"tuple":7}',
    ],
)
def test_an_invalid_message_is_refused(data: bytes) -> None:
    with pytest.raises(Corrupt, match="rank 1"):
        unpack(data, "rank 1")


def test_a_file_that_deepspeed_would_unpickle_is_refused(tmp_path: Path) -> None:
    """`enable_nebula_load: false` loads DeepSpeed's own files, which are not trusted."""
    package = tmp_path / "site" / "deepspeed" / "runtime" / "checkpoint_engine"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    (package / "checkpoint_engine.py").write_text(
        "class CheckpointEngine:\n    def __init__(self, config_params=None): pass\n"
    )
    file = tmp_path / "ds" / "step2" / "mp_rank_00_model_states.pt"
    file.parent.mkdir(parents=True)
    torch.save({"module": {"w": torch.ones(2)}}, file.with_name("good.pt"))
    torch.save({"module": _Bomb(tmp_path / "ran")}, file)
    done = shared().run(
        ["-c", _LOAD, str(tmp_path / "home"), str(file)],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
    )
    assert done.returncode == 0, done.stderr
    assert "ones [1.0, 1.0]" in done.stdout
    assert "Unsupported" in done.stdout
    assert "add_safe_globals" in done.stdout
    assert not (tmp_path / "ran").exists()


_LOAD = """
import sys
from pathlib import Path
import holdfast
from holdfast.adapters.nebula import deepspeed
engine = deepspeed.HoldfastCheckpointEngine(
    deepspeed.NebulaBlock(persistent_storage_path=sys.argv[1], enable_nebula_load=False)
)
bad = Path(sys.argv[2])
print("ones", engine.load(str(bad.with_name("good.pt")))["module"]["w"].tolist())
try:
    engine.load(str(bad))
except holdfast.HoldfastError as error:
    print(type(error).__name__, error)
"""
