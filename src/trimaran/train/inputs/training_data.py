"""Loads the training data of a run, with its objective."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from trimaran.core import ImageRules, Recipe, RowCost
from trimaran.data import TokenShards, prepare
from trimaran.data.data_kind import DataKind, data_kind_of
from trimaran.data.feature_cache import refuse_trained_tower
from trimaran.data.feed import BatchFeed, DataShare
from trimaran.data.image_arrays import FeatureSource
from trimaran.data.prepare_text import Progress
from trimaran.data.quarantine import SampleReader
from trimaran.data.sample_feed import SampleFeedOptions, sample_feeds
from trimaran.data.samples.prepare_samples import prepare_samples
from trimaran.data.samples.sample_index import SampleIndex
from trimaran.data.scene_feed import scene_feeds, scenes_digest
from trimaran.data.sequences import Sequences, split
from trimaran.data.token_feed import TokenFeed
from trimaran.data.tokenizer import Tokenizer
from trimaran.models import outline_if_known
from trimaran.models.perception_spec import PerceptionSpec
from trimaran.models.recipe_images import recipe_image_rules
from trimaran.models.row_cost import row_cost
from trimaran.nets import Network
from trimaran.train.loss.choose_objective import choose_objective
from trimaran.train.loss.objective import Objective
from trimaran.train.loss.perception_objective import PerceptionObjective

CacheFeatures = Callable[[SampleIndex, ImageRules, Path], FeatureSource]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingData:
    """The data of a run. `training` returns the feed without the given quarantined samples.

    `digest` identifies the data. `holdout` is None without held-out samples, `tokenizer` without text.
    """

    training: Callable[[frozenset[int]], BatchFeed]
    holdout: BatchFeed | None
    objective: Objective
    digest: str
    tokenizer: Tokenizer | None


def load_training_data(
    recipe: Recipe,
    network: Network,
    share: DataShare,
    *,
    cache: Path,
    cache_features: CacheFeatures | None = None,
    report_progress: Callable[[], None] = lambda: None,
) -> TrainingData:
    """Return the recipe's data, prepared first if necessary. Raise if the network's vocabulary is too small for it.

    `cache_features` returns cached features of a frozen tower, for a recipe with `data.samples.cache_features`.
    `report_progress` is called for each chunk of a file that is prepared.
    """

    def progress(what: str, fraction: float) -> None:
        report_progress()

    if not recipe.data.samples.cache_features:
        return LOADERS_BY_KIND[data_kind_of(recipe)](recipe, network, share, cache, progress)
    refuse_trained_tower(recipe)
    return _load_samples(recipe, network, share, cache, progress, cache_features)


def _load_text(
    recipe: Recipe, network: Network, share: DataShare, cache: Path, progress: Progress | None = None
) -> TrainingData:
    shards = TokenShards.open(prepare(recipe.data, cache=cache, progress=progress))
    shards.check_vocabulary(network.vocabulary)
    training, holdout = split(shards, recipe.data)

    def feed(sequences: Sequences, quarantined: frozenset[int]) -> BatchFeed:
        reader = SampleReader(vocabulary=network.vocabulary, quarantined=quarantined)
        epochs = recipe.data.epochs if sequences is training else 0
        return TokenFeed(sequences, seed=recipe.train.seed, share=share, reader=reader, epochs=epochs)

    return TrainingData(
        training=lambda quarantined: feed(training, quarantined),
        holdout=feed(holdout, frozenset()) if len(holdout) else None,
        objective=choose_objective(recipe),
        digest=shards.digest,
        tokenizer=shards.tokenizer,
    )


def _load_samples(
    recipe: Recipe,
    network: Network,
    share: DataShare,
    cache: Path,
    progress: Progress | None = None,
    cache_features: CacheFeatures | None = None,
) -> TrainingData:
    rules = recipe_image_rules(recipe)
    index = SampleIndex.open(prepare_samples(recipe.data, rules=rules, cache=cache, progress=progress))
    index.check_vocabulary(network.vocabulary)
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


def _load_scenes(
    recipe: Recipe, network: Network, share: DataShare, cache: Path, progress: Progress | None = None
) -> TrainingData:
    assert isinstance(network.spec, PerceptionSpec), "nothing else is trained on scenes"
    rules = network.spec.scenes()
    feeds = partial(scene_feeds, recipe.data, rules, seed=recipe.train.seed, share=share)
    return TrainingData(
        training=lambda quarantined: feeds(quarantined=quarantined)[0],
        holdout=feeds()[1],
        objective=PerceptionObjective(network.spec),
        digest=scenes_digest(recipe.data, rules),
        tokenizer=None,
    )


LOADERS_BY_KIND: dict[DataKind, Callable[[Recipe, Network, DataShare, Path, Progress], TrainingData]] = {
    "text": _load_text,
    "samples": _load_samples,
    "scenes": _load_scenes,
}
