"""DeepSpeed's own checkpoint engines, without an engine for the training around them."""

from __future__ import annotations

import contextlib
import importlib
import os
from types import SimpleNamespace
from typing import Any

from . import onerank
from .contract import Peer, Pending


class DeepSpeedTorch(Peer):
    """`TorchCheckpointEngine`, the default."""

    title = "DeepSpeed TorchCheckpointEngine"
    module = package = "deepspeed"
    syncs = False
    overlaps = False

    def open(self) -> None:
        """Make the engine; memory is locked by DeepSpeed's own code, since PyTorch's needs an accelerator."""
        os.environ |= {"DS_ACCELERATOR": "cpu", "DS_PIN_MEMORY_BACKEND": "native"}
        onerank.join()
        deepspeed = importlib.import_module("deepspeed")  # pyright finds this file under that name
        deepspeed.init_distributed("gloo", dist_init_required=False, auto_mpi_discovery=False, verbose=False)
        self._engine = self._make()

    def save(self, step: int) -> Pending:
        """Write on the caller."""
        self._engine.makedirs(str(self.path(step)), exist_ok=True)
        self._engine.save(self.state_dicts(), self._file(step))
        return Pending()

    def load(self, step: int) -> None:
        """Load by the engine, which is `torch.load` in all three."""
        self.set_state_dicts(self._engine.load(self._file(step), map_location="cpu"))

    def close(self) -> None:
        """End what the engine has started."""
        self._engine.cleanup()

    def _file(self, step: int) -> str:
        return str(self.path(step) / "states.pt")

    def _make(self) -> Any:
        from deepspeed.runtime.checkpoint_engine import (  # pyright: ignore[reportMissingImports] - as above
            TorchCheckpointEngine,
        )

        return TorchCheckpointEngine()


class DeepSpeedFast(DeepSpeedTorch):
    """`FastCheckpointEngine`, known as FastPersist: libaio and O_DIRECT from a double buffer."""

    title = "DeepSpeed FastCheckpointEngine"

    def _make(self) -> Any:
        from deepspeed.runtime.checkpoint_engine import (  # pyright: ignore[reportMissingImports] - as above
            FastCheckpointEngine,
        )

        return FastCheckpointEngine(*_configuration(is_decoupled=False), optimize_dp_state=False)


class DeepSpeedDecoupled(DeepSpeedTorch):
    """`DecoupledCheckpointEngine`: the same writer in a child, waited for before the next optimizer step.

    The child reads tensors in host memory where they are, so `optimizer.step()` waits for the whole write.
    DeepSpeed's training engine commits there too.
    """

    title = "DeepSpeed DecoupledCheckpointEngine"
    overlaps = True

    def save(self, step: int) -> Pending:
        """Hand the live tensors to the child."""
        from deepspeed.runtime.checkpoint_engine.checkpoint_engine import (  # pyright: ignore[reportMissingImports] - as above
            CheckpointCommitInfo,
        )

        self._engine.makedirs(str(self.path(step)), exist_ok=True)
        self._engine.create(
            CheckpointCommitInfo(tag=self.path(step).name, save_dir=str(self.directory), save_latest=False)
        )
        self._engine.save(self.state_dicts(), self._file(step))
        return Pending(self._commit, self._commit)

    def guard(self) -> contextlib.AbstractContextManager[object]:
        """Commit before the optimizer steps, as DeepSpeed's training engine does."""
        self._commit()
        return contextlib.nullcontext()

    def _commit(self) -> None:
        """Wait for the child, unless the last save is committed."""
        info = self._engine.get_commit_info()
        if info is not None:
            self._engine.commit(info)

    def _make(self) -> Any:
        from deepspeed.runtime.checkpoint_engine import (  # pyright: ignore[reportMissingImports] - as above
            DecoupledCheckpointEngine,
        )

        return DecoupledCheckpointEngine(*_configuration(is_decoupled=True), optimize_dp_state=False)


def _configuration(*, is_decoupled: bool) -> tuple[Any, Any]:
    """Return the parts of a DeepSpeed configuration that the engines read: of the writer, and of its rank."""
    from deepspeed.runtime.model_checkpointing.config import (  # pyright: ignore[reportMissingImports] - as above
        get_checkpoint_config,
    )
    from deepspeed.runtime.model_checkpointing.data_parallel_writer_factory import (  # pyright: ignore[reportMissingImports] - as above
        DataParallelWriterConfig,
    )
    from deepspeed.runtime.swap_tensor.aio_config import (  # pyright: ignore[reportMissingImports] - as above
        get_aio_config,
    )

    writer = {"type": "fast", "decoupled": is_decoupled}
    checkpoint = get_checkpoint_config({"checkpoint": {"checkpoint_serialization": False, "writer": writer}})
    rank = DataParallelWriterConfig(world_size=1, rank=0, global_rank=0, local_rank=0, pure_dp=True)
    return SimpleNamespace(checkpoint_config=checkpoint, aio_config=get_aio_config({})), rank
