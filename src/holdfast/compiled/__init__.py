"""The compile cache beside a run: what torch.compile has made travels with the checkpoints."""

from holdfast.compiled.bringing import begin_sending, bring, warn_of_problems
from holdfast.compiled.cache import CLOSE_LIMIT_S, CompileCache
from holdfast.compiled.sending import Sent

__all__ = ["CLOSE_LIMIT_S", "CompileCache", "Sent", "begin_sending", "bring", "warn_of_problems"]
