"""Prepares the data of a run before the ranks start."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trimaran.app.recipe.data_notices import text_notices
from trimaran.app.recipe.recipe_tokenizer import model_vocabulary
from trimaran.core import Recipe, RowCost, show_bytes
from trimaran.data import Progress, TokenShards, cache_folder, check, prepare
from trimaran.data.data_kind import DataKind, data_kind_of
from trimaran.data.feed import DataShare
from trimaran.data.text.token_feed import TokenFeed
from trimaran.data.text.token_shards import split
from trimaran.data.text.tokenizer import check_vocabulary, load_tokenizer

if TYPE_CHECKING:
    from trimaran.data.samples.sample_index import SampleIndex

MAX_CHECKED_BYTES = 64 << 20  # of data that a dry run reads to its end: some seconds

StepsOfEpochs = Callable[[float], int]
"""Returns the number of steps of that many passes over the data."""


def check_data(recipe: Recipe) -> None:
    """Raise if a quick check of the data fails: nothing is prepared, and only the heads of files are read."""
    kind = data_kind_of(recipe)
    if kind == "scenes":
        return
    if recipe.data.source != "shards":
        check_vocabulary(load_tokenizer(recipe.data.tokenizer).vocab_size, model_vocabulary(recipe))
    if kind == "text":
        check(recipe.data)
    else:
        from trimaran.data.samples.prepare_samples import check_samples
        from trimaran.models.resolve import recipe_image_rules

        check_samples(recipe.data, recipe_image_rules(recipe))


def check_all_data(
    recipe: Recipe,
    notify: Callable[[str], None],
    progress: Progress | None = None,
    *,
    max_bytes: int = MAX_CHECKED_BYTES,
) -> None:
    """Raise what `train` would raise about the data: it is prepared, for the run to use, up to `max_bytes`.

    `notify` is called with remarks about the data, and about parts that were not read.
    """
    check_data(recipe)
    sources = recipe.data.mixture or (recipe.data,)
    paths = [Path(each.path) for each in sources if each.path is not None and each.source != "shards"]
    if data_kind_of(recipe) == "scenes" or not paths:
        return
    files = (file for path in paths for file in (path.rglob("*") if path.is_dir() else (path,)) if file.is_file())
    if (num_bytes := sum(file.stat().st_size for file in files)) > max_bytes:
        notify(f"the data has {show_bytes(num_bytes)}: only the first lines of its files are checked")
    else:
        prepare_data(recipe, progress, notify)


def prepare_data(
    recipe: Recipe, progress: Progress | None = None, notify: Callable[[str], None] = lambda notice: None
) -> Recipe:
    """Prepare the data if it is not cached yet, and raise if it has tokens that the model does not know.

    Returns the recipe; if `data.epochs` is set, `train.steps` is at most the steps of those epochs. `notify` is called
    with what a person should know about the data, such as lines that were left out.
    """
    prepared = PREPARE[data_kind_of(recipe)](recipe, cache_folder(os.environ), progress)
    for notice in prepared.notices:
        notify(notice)
    steps_in = prepared.steps_in
    if not recipe.data.epochs:
        return recipe
    steps, epochs = steps_in(recipe.data.epochs), f"data.epochs {recipe.data.epochs:g}"
    if "steps" not in recipe.train.model_fields_set:
        notify(f"{epochs}: {steps:,} steps")
    elif recipe.train.steps < steps:
        notify(f"train.steps {recipe.train.steps:,} ends the run before {epochs}, which is {steps:,} steps")
        steps = recipe.train.steps
    elif recipe.train.steps > steps:
        notify(f"{epochs} ends the run after {steps:,} steps, before train.steps {recipe.train.steps:,}; "
               "for all of these, set data.epochs=0")  # fmt: skip
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"steps": steps})})


@dataclass(frozen=True, slots=True)
class PreparedData:
    """Prepared data: the steps in its epochs, and what a person should know about it."""

    steps_in: StepsOfEpochs
    notices: list[str]


def _text(recipe: Recipe, cache: Path, progress: Progress | None) -> PreparedData:
    shards = TokenShards.open(prepare(recipe.data, cache=cache, progress=progress))
    _refuse_unknown(recipe, shards)
    feed = TokenFeed(split(shards, recipe.data)[0], seed=0, share=_single_rank(recipe))
    return PreparedData(feed.steps_in, text_notices(recipe.data, shards))


def _samples(recipe: Recipe, cache: Path, progress: Progress | None) -> PreparedData:
    from trimaran.app.recipe.sample_notices import bad_sample_notices, sample_notices
    from trimaran.data.sample_feed import SampleFeedOptions, sample_feeds
    from trimaran.data.samples.prepare_samples import prepare_samples
    from trimaran.data.samples.sample_index import SampleIndex
    from trimaran.models.resolve import recipe_image_rules

    rules = recipe_image_rules(recipe)
    index = SampleIndex.open(prepare_samples(recipe.data, rules=rules, cache=cache, progress=progress))
    _refuse_unknown(recipe, index)
    terms = SampleFeedOptions(rules=rules, cost=RowCost(), seed=recipe.train.seed)
    feed = sample_feeds(recipe.data, index, terms, share=_single_rank(recipe))[0]
    return PreparedData(feed.steps_in, [*bad_sample_notices(index), *sample_notices(recipe.data, index, rules)])


def _scenes(recipe: Recipe, cache: Path, progress: Progress | None) -> PreparedData:
    from trimaran.data.scenes.scene_feed import scene_feeds
    from trimaran.models.perception_spec import perception_spec

    rules = perception_spec(recipe.model).scenes()
    return PreparedData(scene_feeds(recipe.data, rules, seed=0, share=_single_rank(recipe))[0].steps_in, [])


def _refuse_unknown(recipe: Recipe, tokens: "TokenShards | SampleIndex") -> None:
    if (vocabulary := model_vocabulary(recipe)) is not None:
        tokens.check_vocabulary(vocabulary)


def _single_rank(recipe: Recipe) -> DataShare:
    return DataShare(rank=0, dp=1, micro_batch=recipe.train.global_batch, grad_accum=1)


PREPARE: dict[DataKind, Callable[[Recipe, Path, Progress | None], PreparedData]] = {
    "text": _text,
    "samples": _samples,
    "scenes": _scenes,
}
