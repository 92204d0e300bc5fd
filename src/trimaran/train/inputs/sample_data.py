"""Loads samples of different lengths, and scenes of cameras, lidar and radar, as training data."""

from dataclasses import replace
from functools import partial
from pathlib import Path

from trimaran.core import Recipe, RowCost
from trimaran.data import (
    BatchFeed,
    DataShare,
    Progress,
    SampleFeedOptions,
    SampleIndex,
    check_vocabulary,
    prepare_samples,
    sample_feeds,
    scene_feeds,
    scenes_digest,
)
from trimaran.models import outline_if_known, recipe_image_rules, row_cost
from trimaran.nets import Network
from trimaran.train.inputs.training_data import CacheFeatures, TrainingData
from trimaran.train.loss.objective import choose_objective
from trimaran.train.loss.perception_objective import PerceptionObjective


def load_samples(
    recipe: Recipe,
    network: Network,
    share: DataShare,
    cache: Path,
    progress: Progress,
    cache_features: CacheFeatures | None = None,
) -> TrainingData:
    """Return the samples of the recipe. `cache_features` returns cached features of a frozen tower."""
    rules = recipe_image_rules(recipe)
    index = SampleIndex.open(prepare_samples(recipe.data, rules=rules, cache=cache, progress=progress))
    check_vocabulary(index.vocab_size, network.vocabulary)
    outline = outline_if_known(recipe.model, recipe.data)
    options = SampleFeedOptions(
        rules=rules,
        cost=row_cost(outline) if outline else RowCost(),
        seed=recipe.train.seed,
        vocabulary=network.vocabulary,
    )
    if cache_features is not None and rules is not None:
        free = replace(options.cost, patch=0.0, patch_pair=0.0)  # the tower does not run in training
        options = replace(options, features=cache_features(index, rules, cache), cost=free)

    def feeds(quarantined: frozenset[int]) -> tuple[BatchFeed, BatchFeed | None]:
        return sample_feeds(recipe.data, index, options, share=share, quarantined=quarantined)

    return TrainingData(
        training=lambda quarantined: feeds(quarantined)[0],
        holdout=feeds(frozenset())[1],
        objective=choose_objective(recipe, index.source_names, scored=True),
        digest=index.digest,
        tokenizer=index.tokenizer,
    )


def load_scenes(recipe: Recipe, network: Network, share: DataShare) -> TrainingData:
    rules = None if network.spec is None else network.spec.scenes()
    assert rules is not None, "only a perception model is trained on scenes"
    feeds = partial(scene_feeds, recipe.data, rules, seed=recipe.train.seed, share=share)
    return TrainingData(
        training=lambda quarantined: feeds(quarantined=quarantined)[0],
        holdout=feeds()[1],
        objective=PerceptionObjective(rules),
        digest=scenes_digest(recipe.data, rules),
        tokenizer=None,
    )
