"""Prepares the data of a run before the ranks start."""

import os
from collections.abc import Callable
from pathlib import Path

from trimaran.core import Recipe, RowCost
from trimaran.data import Progress, TokenShards, cache_folder, check, prepare
from trimaran.data.data_kind import DataKind, data_kind_of
from trimaran.data.feed import DataShare
from trimaran.data.sample_feed import SampleFeedOptions, sample_feeds
from trimaran.data.samples.prepare_samples import check_samples, prepare_samples
from trimaran.data.samples.sample_index import SampleIndex
from trimaran.data.scene_feed import scene_feeds
from trimaran.data.sequences import split
from trimaran.data.token_feed import TokenFeed
from trimaran.models import ModelSpec, spec_of
from trimaran.models.perception_spec import PerceptionSpec
from trimaran.models.recipe_images import recipe_image_rules
from trimaran.models.vlm_spec import VlmSpec

StepsOfEpochs = Callable[[float], int]
"""Returns the number of steps of that many passes over the data."""


def check_data(recipe: Recipe) -> None:
    """Raise if a quick check of the data fails: nothing is prepared, and only the heads of files are read."""
    match data_kind_of(recipe):
        case "text":
            check(recipe.data)
        case "samples":
            check_samples(recipe.data, recipe_image_rules(recipe))


def prepare_data(recipe: Recipe, progress: Progress | None = None) -> Recipe:
    """Prepare the data if it is not cached yet, and raise if it has tokens that the model does not know.

    Returns the recipe; if `data.epochs` is set, `train.steps` is at most the steps of those epochs.
    """
    steps_in = PREPARE[data_kind_of(recipe)](recipe, cache_folder(os.environ), progress)
    if not recipe.data.epochs:
        return recipe
    steps = steps_in(recipe.data.epochs)
    if "steps" in recipe.train.model_fields_set:
        steps = min(steps, recipe.train.steps)
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"steps": steps})})


def _text(recipe: Recipe, cache: Path, progress: Progress | None) -> StepsOfEpochs:
    shards = TokenShards.open(prepare(recipe.data, cache=cache, progress=progress))
    _refuse_unknown(recipe, shards)
    return TokenFeed(split(shards, recipe.data)[0], seed=0, share=_single_rank(recipe)).steps_in


def _samples(recipe: Recipe, cache: Path, progress: Progress | None) -> StepsOfEpochs:
    rules = recipe_image_rules(recipe)
    index = SampleIndex.open(prepare_samples(recipe.data, rules=rules, cache=cache, progress=progress))
    _refuse_unknown(recipe, index)
    terms = SampleFeedOptions(rules=rules, cost=RowCost(), seed=recipe.train.seed)
    return sample_feeds(recipe.data, index, terms, share=_single_rank(recipe))[0].steps_in


def _scenes(recipe: Recipe, cache: Path, progress: Progress | None) -> StepsOfEpochs:
    spec = spec_of(recipe.model)
    assert isinstance(spec, PerceptionSpec), "only a perception model trains on scenes"
    return scene_feeds(recipe.data, spec.scenes(), seed=0, share=_single_rank(recipe))[0].steps_in


def _refuse_unknown(recipe: Recipe, tokens: TokenShards | SampleIndex) -> None:
    spec = spec_of(recipe.model)
    if isinstance(spec, ModelSpec | VlmSpec):
        tokens.check_vocabulary(spec.vocab)


def _single_rank(recipe: Recipe) -> DataShare:
    return DataShare(rank=0, dp=1, micro_batch=recipe.train.global_batch, grad_accum=1)


PREPARE: dict[DataKind, Callable[[Recipe, Path, Progress | None], StepsOfEpochs]] = {
    "text": _text,
    "samples": _samples,
    "scenes": _scenes,
}
