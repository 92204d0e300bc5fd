"""Network families of plug-ins: they build a module, and our trainer shards it over the data-parallel ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from trimaran.core import ModelSection, Plan, Recipe, UserError, load_plugin, plugin_errors, templated

AXES_OF_OURS = ("tp", "pp", "cp", "ep")


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyModule:
    """What a family builds: an `nn.Module`, called with tokens [B, T], that returns logits [B, T, vocabulary].

    `blocks` are its layers in forward order, which are sharded, compiled and recomputed one by one. A module that
    `takes_documents` is also called with `documents`, [B, T] or None: tokens with different numbers must not see each
    other. It has no buffers: under a plan it is built without memory, and only parameters get values afterwards.
    """

    module: Any
    blocks: Sequence[Any]
    vocabulary: int
    max_seq_len: int
    takes_documents: bool = False


class NetworkFamily(Protocol):
    """The contract of a network family, version 1."""

    contract: int

    def build(self, model: ModelSection) -> FamilyModule:
        """Return the network that the recipe's section describes: `preset`, `shape`. torch's device may be meta."""
        ...


def build_family(section: ModelSection) -> FamilyModule:
    """Return the network of a plug-in's family on the default device; raise UserError if it cannot be built."""
    family: NetworkFamily = load_plugin("network family", section.family)
    with plugin_errors(
        lambda kind, message: UserError(
            "K077.network-family-not-built", where="model.shape", family=section.family, kind=kind, message=message
        )
    ):
        built: Any = family.build(section)
    wrong = ""
    if not isinstance(built, FamilyModule):
        wrong = templated("returns a {kind}, not a FamilyModule", kind=type(built).__name__)
    elif not built.blocks or not {id(each) for each in built.blocks} <= {id(each) for each in built.module.modules()}:
        wrong = "has no blocks, or blocks that are not parts of its module"
    elif names := [name for name, _ in built.module.named_buffers()]:
        wrong = templated(
            "has the buffers {names}: compute them in forward, or make them parameters", names=", ".join(names[:3])
        )
    if wrong:
        raise UserError("K077.network-family", where="model.family", family=section.family, wrong=wrong)
    return built


def check_plugin_family(plan: Plan, recipe: Recipe) -> None:
    """Raise for what needs more of a network than a plug-in's family says about it."""
    if not recipe.model.kind.is_plugin:
        return
    reasons = {f"plan.mesh.{axis}": getattr(plan.mesh, axis) > 1 for axis in AXES_OF_OURS}
    reasons |= {"plan.precision": plan.precision == "fp8", "model.adapter": recipe.model.adapter is not None}
    reasons |= {"model.freeze": bool(recipe.model.freeze)}
    if field := next((each for each, is_set in reasons.items() if is_set), ""):
        raise UserError("K080.plug-network-family", where=field, field=field)
