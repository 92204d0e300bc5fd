"""Which way data takes to a batch: text in one stream, samples of their own lengths, or simulated scenes."""

from typing import Literal

from trimaran.core import Recipe, UserError

Kind = Literal["text", "samples", "scenes"]
SAMPLES = frozenset({"chat", "webdataset", "parquet", "image-folder", "shapes"})


def kind_of(recipe: Recipe) -> Kind:
    """Return how the recipe's data is laid out. Text for a model that sees is a sample without an image."""
    section, family = recipe.data, recipe.model.family
    scenes = section.source == "scenes"
    if scenes != (family == "perception"):
        fix = "set model.family to perception" if scenes else "set data.source to scenes"
        raise UserError("T052", f"the family {family} cannot be trained on {section.source}", where="data.source",
                        fix=f"{fix}, or train another family")  # fmt: skip
    if scenes and section.mixture:
        raise UserError("T052", "scenes cannot be mixed with anything", where="data.mixture", fix="remove data.mixture")
    if scenes:
        return "scenes"
    return "samples" if section.mixture or section.source in SAMPLES or family == "vlm" else "text"
