"""A machine whose clock is wrong by SKEW_SECONDS, and jumps back by ten more once it has run for ten seconds."""

import os
import time

real, began, skew = time.time, time.monotonic(), float(os.environ.get("SKEW_SECONDS", "0"))
time.time = lambda: real() + skew - (10.0 if time.monotonic() - began > 10.0 else 0.0)
