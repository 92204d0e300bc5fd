"""Builds the network of a plug-in's family without weights."""

import torch

from trimaran.core import Recipe, UserError
from trimaran.data.data_kind import data_kind_of
from trimaran.models import refuse_unmatched
from trimaran.models.hf_facts import refuse_seq_len
from trimaran.nets.plugin_network import PluginNetwork, plugin_network


def open_family_network(recipe: Recipe) -> PluginNetwork:
    """Return the network on the meta device; raise UserError if it does not suit the recipe."""
    with torch.device("meta"):
        network = plugin_network(recipe.model)
    refuse_seq_len(recipe.data.seq_len, network.max_seq_len)
    refuse_unmatched(recipe.train.precision, [name for name, _ in network.module.named_modules() if name])
    separates = recipe.data.isolate_documents or data_kind_of(recipe) != "text"
    if separates and not network.built.takes_documents:
        raise UserError("K080", f"the network family '{recipe.model.family}' does not keep the documents of a row "
                        "apart", where="data.isolate_documents" if recipe.data.isolate_documents else "data.source",
                        fix="train on text without isolate_documents, or let the family take documents")  # fmt: skip
    return network
