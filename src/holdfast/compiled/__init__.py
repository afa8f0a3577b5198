"""Compile cache of a run: output of torch.compile that travels with the checkpoints."""

from holdfast.compiled.cache import CLOSE_LIMIT_S, CompiledCode
from holdfast.compiled.startup import begin_sending, bring, warn_of_problems
from holdfast.compiled.upload import Sent

__all__ = ["CLOSE_LIMIT_S", "CompiledCode", "Sent", "begin_sending", "bring", "warn_of_problems"]
