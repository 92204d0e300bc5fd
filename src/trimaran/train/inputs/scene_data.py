"""Loads scenes of cameras, lidar and radar as training data."""

from functools import partial

from trimaran.core import Recipe
from trimaran.data.feed import DataShare
from trimaran.data.scenes.scene_feed import scene_feeds, scenes_digest
from trimaran.nets import Network
from trimaran.train.inputs.training_data import TrainingData
from trimaran.train.loss.perception_objective import PerceptionObjective


def load_scenes(recipe: Recipe, network: Network, share: DataShare) -> TrainingData:
    """Return the scenes of the recipe."""
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
