"""An adapter attached to the networks of a run, or nothing."""

from trimaran.core import Plan, Recipe
from trimaran.nets import Network


class Attachment:
    """Nothing is attached. `packs`: frozen weights are packed shard by shard, so that another plan has other bytes."""

    needs_whole = packs = False

    def check(self, plan: Plan) -> None:
        """Raise UserError if the plan cannot train what is attached."""

    def attach(self, network: Network, whole: Network | None) -> None:
        """Attach to a stage; `whole` is the network of all stages without weights, if `needs_whole`."""

    def pack(self, network: Network, plan: Plan) -> None:
        """Store the weights that are not trained as the plan says."""

    def fill(self, network: Network, whole: Network | None) -> None:
        """Give what is attached its first values. The weights of the network must be loaded."""


def attachment_of(recipe: Recipe) -> Attachment:
    """Return the attachment of the recipe."""
    if recipe.model.adapter is None:
        return Attachment()
    from trimaran.train.features.adapter import Adapter  # noqa: PLC0415  few runs train one

    return Adapter(recipe.model, seed=recipe.train.seed)
