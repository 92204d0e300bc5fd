"""Loads the training data of a run, with its objective, and the loader of a rank."""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trimaran.core import DEVICE_TRAITS, ImageRules, Recipe
from trimaran.data import (
    BatchFeed,
    DataShare,
    Loader,
    LoaderLimits,
    SampleReader,
    Sequences,
    TokenFeed,
    Tokenizer,
    TokenShards,
    check_vocabulary,
    data_kind_of,
    prepare,
    split,
)
from trimaran.machine import CGROUP, cpu_quota, free_bytes
from trimaran.nets import Network
from trimaran.train.loss.objective import Objective, choose_objective
from trimaran.train.process.rank_setup import RankInfo

if TYPE_CHECKING:
    from trimaran.data.row_arrays import FeatureSource
    from trimaran.data.samples.sample_index import SampleIndex

CacheFeatures = Callable[["SampleIndex", ImageRules, Path], "FeatureSource"]


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

    kind, features = data_kind_of(recipe), None
    if recipe.data.samples.cache_features:
        from trimaran.data.feature_cache import refuse_trained_tower  # noqa: PLC0415  few runs cache features

        refuse_trained_tower(recipe)
        kind, features = "samples", cache_features
    if kind == "samples":
        from trimaran.train.inputs.sample_data import load_samples  # noqa: PLC0415  it imports Pillow

        return load_samples(recipe, network, share, cache, progress, features)
    if kind == "scenes":
        from trimaran.train.inputs.sample_data import load_scenes  # noqa: PLC0415  it imports readers of sensor files

        return load_scenes(recipe, network, share)
    shards = TokenShards.open(prepare(recipe.data, cache=cache, progress=progress))
    check_vocabulary(shards.vocab_size, network.vocabulary)
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


def build_loader(recipe: Recipe, rank_info: RankInfo, feed: Callable[[], BatchFeed], start: int) -> Loader:
    """Return a loader of the batches from step `start` on. `feed` is called now, because the quarantine may change."""
    return Loader(
        feed(),
        start_step=start,
        steps=recipe.train.steps,
        workers=recipe.data.workers,
        timeout_seconds=recipe.data.timeout_seconds,
        limits=rank_loader_limits(rank_info),
    )


def rank_loader_limits(rank_info: RankInfo, cgroup: Path = CGROUP) -> LoaderLimits:
    """Return this rank's fraction of the cores and the free memory of the machine, or of its container.

    One core is left for the rank itself, which computes on it or launches its device's kernels from it.
    """
    ranks = max(1, rank_info.local_world_size)
    allowed = len(os.sched_getaffinity(0))
    quota = cpu_quota(cgroup)
    return LoaderLimits(
        cores=max(0, (allowed if quota is None else min(allowed, max(1, math.floor(quota)))) // ranks - 1),
        free_bytes=free_bytes(cgroup) // ranks,
        pin_memory=DEVICE_TRAITS[rank_info.device.type].has_own_memory,
    )
