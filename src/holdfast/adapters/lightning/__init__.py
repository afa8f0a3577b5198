"""Lightning: `HoldfastCheckpoint`, a ModelCheckpoint that saves in the background, and its CheckpointIO.

The one line in a script is `Trainer(callbacks=[HoldfastCheckpoint(dirpath="runs/x")])`; with Fabric it is
`Fabric(plugins=[HoldfastCheckpointIO("runs/x.holdfast")])`.
"""

from holdfast.adapters.lightning.callback import HoldfastCheckpoint
from holdfast.adapters.lightning.plugin import HoldfastCheckpointIO

__all__ = ["HoldfastCheckpoint", "HoldfastCheckpointIO"]
