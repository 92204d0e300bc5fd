"""Loads a trained model to generate with. Imports torch."""

import os

from trimaran.data.prepare_text import cache_folder
from trimaran.infer.open_weights import open_trained as open_with_cache
from trimaran.infer.trained_model import TrainedModel
from trimaran.infer.weights_location import TrainedWeights


def open_trained(weights: TrainedWeights, dtype: str) -> TrainedModel:
    """Return the model of these weights on this machine's first device. Digests of bases are in the user's cache."""
    return open_with_cache(weights, dtype, cache=cache_folder(os.environ))
