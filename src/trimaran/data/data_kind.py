"""The kind of data a recipe trains on: a stream of text, samples of different lengths, or simulated scenes."""

from typing import Literal

from trimaran.core import Recipe, UserError

DataKind = Literal["text", "samples", "scenes"]
SAMPLE_SOURCES = frozenset({"chat", "webdataset", "parquet", "image-folder", "shapes"})


def data_kind_of(recipe: Recipe) -> DataKind:
    """Return the kind of the recipe's data. For a vision-language model, text is a sample without images."""
    section, family = recipe.data, recipe.model.kind
    scenes = section.source == "scenes"
    if scenes != (family.reads == "scenes"):
        fix = "set model.family to perception" if scenes else "set data.source to scenes"
        raise UserError(
            "T052.family-cannot-trained", where="data.source", family=family.name, source=section.source, way=fix
        )
    if scenes and section.mixture:
        raise UserError("T052.scenes-cannot-part", where="data.mixture")
    if scenes:
        return "scenes"
    return "samples" if section.mixture or section.source in SAMPLE_SOURCES or family.reads == "images" else "text"
