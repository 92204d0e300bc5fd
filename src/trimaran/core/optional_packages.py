"""Optional features: packages that only some plans need, and the layer sizes that fp8 supports."""

from importlib.util import find_spec

from trimaran.core.errors import UserError
from trimaran.core.plan import Plan

# Linear layers run in fp8 if they have at least this many features (below that, the casts cost more than the matmul
# saves), in multiples of the 16 bytes that a tensor core reads at a time.
MIN_FP8_FEATURES, FP8_FEATURE_MULTIPLE = 256, 16
FP8_BLOCK, MX_BLOCK = 128, 32  # values that share a scale in the recipes `block` and `mx`
# Features of a layer that each recipe needs a multiple of. The matmuls of `mx` sum over whole blocks only.
RECIPE_MULTIPLES = {"tensor": FP8_FEATURE_MULTIPLE, "block": FP8_BLOCK, "mx": MX_BLOCK}


def refuse_missing_packages(plan: Plan) -> None:
    """Raise if the plan needs a package that is not installed here. Nothing is imported."""
    package = plan.engine_traits.package
    if package and find_spec(package) is None:
        raise deepspeed_missing(f"No module named '{package}'")


def no_fp8_layers(recipe: str = "tensor") -> UserError:
    """Return the error for a model without layers that are large enough for fp8."""
    return UserError("P034", "no layer of this model is large enough for fp8", where="plan.precision",
                     fix=f"use bf16: fp8 takes linear layers of at least {MIN_FP8_FEATURES} x {MIN_FP8_FEATURES} "
                     f"features, both multiples of {RECIPE_MULTIPLES[recipe]}")  # fmt: skip


def refused_recipe(recipe: str, device: str) -> UserError:
    """Return the error for a device whose tensor cores do not have the scales of a recipe."""
    needs = {"block": "Hopper GPUs (H100, H200, H800)", "mx": "Blackwell GPUs (B200, GB200)"}[recipe]
    return UserError("P113", f"{device} has no fp8 matmuls with the scales of recipe {recipe}: {needs} have them",
                     where="plan.fp8.recipe", fix="set plan.fp8.recipe to tensor, or use bf16")  # fmt: skip


def deepspeed_missing(reason: str) -> UserError:
    return UserError("P037", f"engine deepspeed needs the deepspeed package ({reason})", where="plan.engine",
                     fix="pip install 'trimaran[deepspeed]', or set plan.engine to torch")  # fmt: skip
