"""Sets the clock of a Python process by CLOCK_OFFSET_S, for processes that must live in another year."""

import os
import time

_now, _offset_s = time.time, float(os.environ.get("CLOCK_OFFSET_S", "0"))
time.time = lambda: _now() + _offset_s
