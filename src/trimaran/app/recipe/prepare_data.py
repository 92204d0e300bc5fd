"""Prepares the data of a run and checks its ranks before they start, and tells what a person should know of them."""

import os
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimaran.app.recipe.recipe_files import model_vocabulary
from trimaran.app.recipe.request import Request
from trimaran.core import DataSection, ImageRules, MixtureSource, Recipe, RowCost, refuse_missing_packages, show_bytes
from trimaran.data import DataShare, Progress, TokenFeed, TokenShards, cache_folder, check, data_kind_of, prepare
from trimaran.data.feature_cache import refuse_trained_tower
from trimaran.data.text.bad_lines import as_notice
from trimaran.data.text.source_files import held_out_files
from trimaran.data.text.text_sources import ignored_splits
from trimaran.data.text.token_shards import BAD, split
from trimaran.data.text.tokenizer import check_vocabulary, load_tokenizer
from trimaran.models import decoder_of, model_folder, spec_to_hf, weight_files

if TYPE_CHECKING:
    from trimaran.data.samples.sample_index import SampleIndex

MAX_CHECKED_BYTES = 64 << 20  # of data that a dry run reads to its end: some seconds
TEMPLATE_SOURCES = ("chat", "parquet", "datasets", "webdataset", "shapes")  # may hold conversations
NO_TORCH = "torch is not installed here"


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
    """Prepare the data up to `max_bytes`, and raise as `train` does; `notify` gets remarks, and parts not read."""
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
    kind, cache = data_kind_of(recipe), cache_folder(os.environ)
    share = DataShare(rank=0, dp=1, micro_batch=recipe.train.global_batch, grad_accum=1)
    notices: list[str] = []
    if kind == "text":
        shards = TokenShards.open(prepare(recipe.data, cache=cache, progress=progress))
        _refuse_unknown(recipe, shards)
        steps_in = TokenFeed(split(shards, recipe.data)[0], seed=0, share=share).steps_in
        notices = text_notices(recipe.data, shards)
    elif kind == "scenes":
        from trimaran.data.scenes.scene_feed import scene_feeds
        from trimaran.models.perception_spec import perception_spec

        scenes = perception_spec(recipe.model).scenes()
        steps_in = scene_feeds(recipe.data, scenes, seed=0, share=share)[0].steps_in
    else:
        from trimaran.data import SampleFeedOptions, SampleIndex, prepare_samples, sample_feeds
        from trimaran.models.resolve import recipe_image_rules

        rules = recipe_image_rules(recipe)
        index = SampleIndex.open(prepare_samples(recipe.data, rules=rules, cache=cache, progress=progress))
        _refuse_unknown(recipe, index)
        terms = SampleFeedOptions(rules=rules, cost=RowCost(), seed=recipe.train.seed)
        steps_in = sample_feeds(recipe.data, index, terms, share=share)[0].steps_in
        for source, part in zip(index.source_names, index.parts, strict=True):
            if number := part.meta.num_bad:
                first, total = part.bad[0], number + part.num_samples
                plural = "sample was" if number == 1 else "samples were"
                notices.append(f"{source}: {number:,} bad {plural} left out of {total:,}, such as {first['where']}: "
                               f"{first['reason']}; all are listed in {part.path / BAD}")  # fmt: skip
        notices += sample_notices(recipe.data, index, rules)
    for notice in notices:
        notify(notice)
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


def _refuse_unknown(recipe: Recipe, tokens: "TokenShards | SampleIndex") -> None:
    if (vocabulary := model_vocabulary(recipe)) is not None:
        check_vocabulary(tokens.vocab_size, vocabulary)


def text_notices(section: DataSection, shards: TokenShards) -> list[str]:
    """Return the notices about packed text."""
    meta, notices = shards.meta, split_notices(section)
    if meta.num_bad:
        notices.append(as_notice(meta.num_bad, meta.num_lines, shards.bad, str(shards.path / BAD)))
    return notices


def split_notices(source: DataSection | MixtureSource) -> list[str]:
    """Return notices about the splits of a source that are not used."""
    if source.source == "nanogpt" and source.path and Path(source.path).is_dir():
        held_out = held_out_files(sorted(Path(source.path).rglob("*.bin")))
        return [f"{source.path}: {file.name} is not used for training" for file in held_out]
    ignored = ignored_splits(Path(source.path)) if source.source in ("datasets", "chat") and source.path else []
    if not ignored:
        return []
    names = f"split {ignored[0]} is" if len(ignored) == 1 else f"splits {', '.join(ignored)} are"
    return [f"{source.path}: only the split train is read; the {names} not used"]


def sample_notices(section: DataSection, index: "SampleIndex", rules: ImageRules | None) -> list[str]:
    """Return the notices about prepared samples."""
    from trimaran.data.samples.prepare_samples import sources_of
    from trimaran.data.samples.tokenize_chat import ChatTokenizer

    notices = [notice for source in sources_of(section) for notice in split_notices(source)]
    if any(source.source in TEMPLATE_SOURCES for source in sources_of(section)):
        chat = ChatTokenizer(index.tokenizer, section.samples.template, rules, section.seq_len)
        own = chat.own_template
        if own is None and not chat.is_named:
            notices.append(f"the tokenizer has no chat template: conversations are written as {chat.template}; "
                           "data.samples.template names another")  # fmt: skip
        if own is not None and own.writes_date:
            notices.append("the chat template writes the date: it is always 26 Jul 2024 in training data")
        if own is not None and not own.ends_turns:
            notices.append("the chat template writes nothing after an answer: the model does not learn when to stop")
    return notices


def refuse_before_start(request: Request) -> None:
    """Raise now what a rank would find minutes later and what does not depend on the machine."""
    refuse_missing_packages(request.plan)
    if request.recipe.data.samples.cache_features:
        refuse_trained_tower(request.recipe)
    if folder := request.recipe.model.path:
        weight_files(model_folder(folder))
    if request.recipe.train.save and (decoder := decoder_of(request.spec)) is not None:
        spec_to_hf(decoder)


def check_ranks(request: Request) -> dict[str, Any]:
    """Build ranks of the plan without weights, and return which, for `--json`. Raises what `train` would raise."""
    refuse_before_start(request)
    if find_spec("torch") is None:
        return {"ranks": [], "world_size": request.plan.mesh.world_size, "seconds": 0.0, "not_built": NO_TORCH}
    from trimaran.train.fake_ranks import check_build

    found = asdict(check_build(request.recipe, request.plan))
    return found | {"ranks": list(found["ranks"])}


def show_check(check: dict[str, Any]) -> str:
    """Return the line of `--dry-run` about the ranks that were built."""
    ranks, world_size = check["ranks"], check["world_size"]
    if not ranks:
        return f"not built: {check['not_built']}; only the plan is checked"
    names = " and ".join(f"rank {rank:,}" for rank in ranks)
    return f"built {names} of {world_size:,} without weights in {check['seconds']:.1f} s: the model accepts this plan"
