"""Packages that only some plans need."""

from importlib.util import find_spec

from trimaran.core.errors import UserError
from trimaran.core.plan import Plan

# What is multiplied in fp8: layers with at least so many features (below that the casts cost more than the product
# saves), in multiples of the 16 bytes that a tensor core reads at a time.
FP8_SMALLEST, FP8_MULTIPLE = 256, 16


def refuse_missing_extras(plan: Plan) -> None:
    """Raise when the plan needs a package that is not installed here. Nothing is imported."""
    if plan.engine == "deepspeed" and find_spec("deepspeed") is None:
        raise deepspeed_missing("No module named 'deepspeed'")


def deepspeed_missing(reason: str) -> UserError:
    return UserError("P037", f"engine deepspeed needs the deepspeed package ({reason})", where="plan.engine",
                     fix="pip install 'trimaran[deepspeed]', or set plan.engine to torch")  # fmt: skip
