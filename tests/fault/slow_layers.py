"""Makes each layer TRIMARAN_TEST_LAYER_SECONDS slower; imported if TRIMARAN_TEST_PLUGIN names this module.

Layers sleep, so that they take equally long on a busy machine.
"""

import os
import time
from typing import Any

from trimaran.nets import DecoderLayer

seconds = float(os.environ["TRIMARAN_TEST_LAYER_SECONDS"])
forward = DecoderLayer.forward


def forward_slowly(self: DecoderLayer, *inputs: Any, **named: Any) -> Any:
    time.sleep(seconds)
    return forward(self, *inputs, **named)


DecoderLayer.forward = forward_slowly  # type: ignore[method-assign]
