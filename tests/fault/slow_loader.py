"""Makes the loader TRIMARAN_TEST_LOAD_SECONDS slower per sample; imported if TRIMARAN_TEST_PLUGIN names this module."""

import os
import time

from trimaran.data import Sequences, TokenSample

seconds = float(os.environ["TRIMARAN_TEST_LOAD_SECONDS"])
load = Sequences.__getitem__


def load_slowly(self: Sequences, index: int) -> TokenSample:
    time.sleep(seconds)
    return load(self, index)


Sequences.__getitem__ = load_slowly  # type: ignore[method-assign]
