"""Reads a file of accelerate or DeepSpeed as pins of a plan: which of the two it is, is asked of its fields."""

from pathlib import Path

from trimaran.core import UserError
from trimaran.planner.read import read_accelerate, read_deepspeed
from trimaran.planner.read.read_config import ReadConfig, load_tree


def read_pins(path: Path) -> ReadConfig:
    """Return the pins in a tool's configuration. Raises UserError if it is neither tool's, or contradicts itself."""
    names = load_tree(path).keys()
    if names & {"distributed_type", "compute_environment"}:
        return read_accelerate.read_accelerate(path)
    if names & read_deepspeed.FIELDS:
        return read_deepspeed.read_deepspeed(path)
    if names & read_accelerate.FIELDS:
        return read_accelerate.read_accelerate(path)
    raise UserError("P070", "this is neither accelerate's configuration nor DeepSpeed's", where=str(path),
                    fix="name a file that `accelerate config` wrote, or a ds_config.json")  # fmt: skip
