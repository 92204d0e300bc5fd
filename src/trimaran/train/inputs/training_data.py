"""What a run is trained on: its data, and what is made of it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from trimaran.core import ImageRules, Recipe, RowCost
from trimaran.data import TokenShards, prepare
from trimaran.data.data_kind import Kind, kind_of
from trimaran.data.feature_cache import refuse_trained
from trimaran.data.feed import BatchFeed, DataShare
from trimaran.data.image_arrays import Features
from trimaran.data.quarantine import Screen
from trimaran.data.sample_feed import SampleTerms, sample_feeds
from trimaran.data.samples.prepare_samples import prepare_samples
from trimaran.data.samples.sample_index import SampleIndex
from trimaran.data.scene_feed import scene_feeds, scenes_digest
from trimaran.data.sequences import Sequences, split
from trimaran.data.token_feed import TokenFeed
from trimaran.data.tokenizer import Tokenizer
from trimaran.models import outline_if_told
from trimaran.models.perception_spec import PerceptionSpec
from trimaran.models.recipe_images import recipe_image_rules
from trimaran.models.row_cost import row_cost
from trimaran.nets import Network
from trimaran.train.loss.objective import LanguageObjective, Objective
from trimaran.train.loss.perception_objective import PerceptionObjective

Remember = Callable[[SampleIndex, ImageRules, Path], Features]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingData:
    """The data of a run. `training` is asked again once samples have been put in quarantine.

    `digest` tells this data from any other. There may be neither a tokenizer nor samples that are held out.
    """

    training: Callable[[frozenset[int]], BatchFeed]
    holdout: BatchFeed | None
    objective: Objective
    digest: str
    tokenizer: Tokenizer | None


def load_training_data(
    recipe: Recipe, network: Network, share: DataShare, *, cache: Path, remember: Remember | None = None
) -> TrainingData:
    """Return the recipe's data, prepared if it is not yet, for a network that knows its tokens.

    `remember` keeps what a frozen tower makes of the images, for a recipe that asks for it.
    """
    if not recipe.data.samples.cache_features:
        return LOADS[kind_of(recipe)](recipe, network, share, cache)
    refuse_trained(recipe)
    return _samples(recipe, network, share, cache, remember)


def _text(recipe: Recipe, network: Network, share: DataShare, cache: Path) -> TrainingData:
    shards = TokenShards.open(prepare(recipe.data, cache=cache))
    shards.refuse_unknown(network.vocabulary)
    training, holdout = split(shards, recipe.data)

    def feed(sequences: Sequences, quarantined: frozenset[int]) -> BatchFeed:
        screen = Screen(vocabulary=network.vocabulary, quarantined=quarantined)
        epochs = recipe.data.epochs if sequences is training else 0
        return TokenFeed(sequences, seed=recipe.train.seed, share=share, screen=screen, epochs=epochs)

    return TrainingData(
        training=lambda quarantined: feed(training, quarantined),
        holdout=feed(holdout, frozenset()) if len(holdout) else None,
        objective=LanguageObjective(),
        digest=shards.digest,
        tokenizer=shards.tokenizer,
    )


def _samples(
    recipe: Recipe, network: Network, share: DataShare, cache: Path, remember: Remember | None = None
) -> TrainingData:
    rules = recipe_image_rules(recipe)
    index = SampleIndex.open(prepare_samples(recipe.data, rules=rules, cache=cache))
    index.refuse_unknown(network.vocabulary)
    outline = outline_if_told(recipe.model, recipe.data)
    terms = SampleTerms(
        rules=rules,
        cost=row_cost(outline) if outline else RowCost(),
        seed=recipe.train.seed,
        vocabulary=network.vocabulary,
    )
    if remember is not None and rules is not None:
        free = replace(terms.cost, patch=0.0, patch_pair=0.0)  # the tower does not run
        terms = replace(terms, features=remember(index, rules, cache), cost=free)

    def feeds(quarantined: frozenset[int]) -> tuple[BatchFeed, BatchFeed | None]:
        return sample_feeds(recipe.data, index, terms, share=share, quarantined=quarantined)

    return TrainingData(
        training=lambda quarantined: feeds(quarantined)[0],
        holdout=feeds(frozenset())[1],
        objective=LanguageObjective(index.source_names, scored=True),
        digest=index.digest,
        tokenizer=index.tokenizer,
    )


def _scenes(recipe: Recipe, network: Network, share: DataShare, cache: Path) -> TrainingData:
    assert isinstance(network.spec, PerceptionSpec), "nothing else is trained on scenes"
    rules = network.spec.scenes()
    feeds = partial(scene_feeds, recipe.data, rules, seed=recipe.train.seed, share=share)
    return TrainingData(
        training=lambda quarantined: feeds(quarantined=quarantined)[0],
        holdout=feeds()[1],
        objective=PerceptionObjective(network.spec),
        digest=scenes_digest(rules),
        tokenizer=None,
    )


LOADS: dict[Kind, Callable[[Recipe, Network, DataShare, Path], TrainingData]] = {
    "text": _text,
    "samples": _samples,
    "scenes": _scenes,
}
