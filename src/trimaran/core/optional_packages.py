"""Optional features: packages that only some plans need, and the layer sizes that fp8 supports."""

from importlib.util import find_spec

from trimaran.core.errors import UserError
from trimaran.core.plan import Plan

# Linear layers run in fp8 if they have at least this many features (below that, the casts cost more than the matmul
# saves), in multiples of the 16 bytes that a tensor core reads at a time.
MIN_FP8_FEATURES, FP8_FEATURE_MULTIPLE = 256, 16


def refuse_missing_packages(plan: Plan) -> None:
    """Raise if the plan needs a package that is not installed here. Nothing is imported."""
    if plan.engine == "deepspeed" and find_spec("deepspeed") is None:
        raise deepspeed_missing("No module named 'deepspeed'")


def no_fp8_layers() -> UserError:
    """Return the error for a model without layers that are large enough for fp8."""
    return UserError("P034", "no layer of this model is large enough for fp8", where="plan.precision",
                     fix=f"use bf16: fp8 takes linear layers of at least {MIN_FP8_FEATURES} x {MIN_FP8_FEATURES} "
                     f"features, both multiples of {FP8_FEATURE_MULTIPLE}")  # fmt: skip


def deepspeed_missing(reason: str) -> UserError:
    return UserError("P037", f"engine deepspeed needs the deepspeed package ({reason})", where="plan.engine",
                     fix="pip install 'trimaran[deepspeed]', or set plan.engine to torch")  # fmt: skip
