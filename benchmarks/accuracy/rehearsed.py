"""The table of rehearsed vision-language and perception ranks beside their predictions."""

import json
from pathlib import Path

from benchmarks import rehearsals

VISION = Path(__file__).parents[1] / "h200_vision.jsonl"


def vision_table() -> str:
    """Return the table with today's predictions."""
    lines = [json.loads(line) for line in VISION.read_text().splitlines()]
    return rehearsals.table([rehearsals.with_prediction(line) for line in lines])
