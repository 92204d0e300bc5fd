"""Computes the features of a frozen vision tower for all images before training, and caches them on disk."""

import hashlib
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from trimaran.core import ImageRules, Plan, Recipe, UserError, read_regular_text, show_bytes, write_atomically
from trimaran.data import BF16, FeatureCache, SampleIndex, fill_patches, grids_of, measure_images, refuse_trained_tower
from trimaran.models import VlmSpec, model_folder, vlm_of, weight_files
from trimaran.nets import Network, Vlm, black_image, initialise, network_of
from trimaran.parallel import autocast, override_precision
from trimaran.train.agreement import FlagAllReduce
from trimaran.train.inputs.training_data import load_training_data
from trimaran.train.process.rank_setup import RankInfo
from trimaran.train.steppers.feature import Feature, Load, LoadContext

log = logging.getLogger(__name__)

MAX_PATCHES = 1 << 14  # per forward of the tower
DECODER_THREADS = 4  # decoding an image releases the GIL
KEY_CHARACTERS = 32
NUM_PROGRESS_LINES = 10  # in the log, approximately
STORED_DTYPES = {torch.float32: np.dtype(np.float32), torch.bfloat16: BF16, torch.float16: np.dtype(np.float16)}


@dataclass
class VisionEncoder:
    """The recipe's vision tower, frozen and unsharded on every rank, so that no rank waits for another."""

    recipe: Recipe
    plan: Plan
    rank_info: RankInfo
    rules: ImageRules

    @cached_property
    def spec(self) -> VlmSpec:
        return vlm_of(self.recipe.model)

    @cached_property
    def network(self) -> Network:
        spec = self.spec
        with torch.device("meta"):
            network = network_of(spec, range(spec.vision.layers))
        # The same modules, precision and initial weights as in training.
        override_precision(network, self.recipe.train.precision, self.rank_info.device)
        network.module.to_empty(device=self.rank_info.device)
        path = self.recipe.model.path
        if path and weight_files(model_folder(path)):
            network.load(model_folder(path))
        else:
            initialise(network.module, seed=self.recipe.train.seed, spec=spec)
        network.module.requires_grad_(False)
        network.module.eval()
        return network

    @torch.no_grad()
    def encode(self, patches: Tensor, grids: Tensor) -> Tensor:
        """Return the input of the projector for these images, [tokens, width], on the CPU, in the tower's dtype."""
        module = self.network.module
        assert isinstance(module, Vlm)
        with autocast(self.plan, self.rank_info.device):
            return module.encode(patches.to(self.rank_info.device), grids.to(self.rank_info.device)).cpu()

    def probe(self) -> Tensor:
        """Return the features of one empty group of patches. They have the width and dtype of all features."""
        black = black_image(self.spec.vision, self.rules.merge, self.rank_info.device)
        return self.encode(black.patches, black.grids)

    def digest(self) -> str:
        digest = hashlib.sha256()
        for name, parameter in sorted(self.network.module.named_parameters()):
            digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
            digest.update(parameter.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().data)
        return digest.hexdigest()


def build_feature_cache(
    recipe: Recipe,
    plan: Plan,
    rank_info: RankInfo,
    index: SampleIndex,
    rules: ImageRules,
    cache: Path,
    *,
    report_progress: Callable[[], None] = lambda: None,
) -> FeatureCache:
    """Return the features of all images of the index. Those that are not cached yet are computed.

    Every rank calls it. All ranks share the work, part by part. If machines do not share a disk, the ranks of each
    machine then compute the parts that other machines have stored on theirs. `report_progress` is called for each part.
    """
    refuse_trained_tower(recipe)
    encoder = VisionEncoder(recipe, plan, rank_info, rules)
    message = bytearray(KEY_CHARACTERS + 1)
    if dist.get_rank() == 0:
        arithmetic = [encoder.plan.precision, sorted(encoder.recipe.train.precision.items())]
        facts = [encoder.digest(), index.digest, encoder.rules.facts(), arithmetic]
        message[:-1] = hashlib.sha256(repr(facts).encode()).hexdigest()[:KEY_CHARACTERS].encode()
        folder = cache / "features" / message[:-1].decode()
        names = {str(dtype): dtype for dtype in STORED_DTYPES}
        note = folder / "dtype"
        if not note.exists():
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(note, str(encoder.probe().dtype), sync=True)
        message[-1] = [*STORED_DTYPES].index(names[read_regular_text(note, follow_links=True)])
    dist.broadcast(torch.frombuffer(message, dtype=torch.uint8), src=0)
    dtype, tokens = [*STORED_DTYPES.values()][message[-1]], measure_images(index.image_sizes, encoder.rules).tokens
    width = encoder.spec.feature_width * (1 + len(encoder.spec.projector.deepstack))
    features = FeatureCache(cache / "features" / message[:-1].decode(), tokens, width=width, dtype=dtype)
    for rank, size in ((rank_info.rank, rank_info.world_size), (rank_info.local_rank, rank_info.local_world_size)):
        missing = features.missing()
        need = sum(map(features.num_bytes, missing))
        cache.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(cache).free
        # All ranks must raise together; otherwise those with enough space would wait for the others.
        if FlagAllReduce(need > free).wait():
            raise UserError(
                "T063.features-all-images",
                where="data.samples.cache_features",
                need=show_bytes(need),
                free=show_bytes(free),
            )
        mine, rounds, log_every = missing[rank::size], 0, max(1, len(missing) // (size * NUM_PROGRESS_LINES))
        # The ranks go part by part together, so that no rank waits for longer than a part takes.
        while FlagAllReduce(bool(mine)).wait():
            report_progress()
            if mine:
                part = mine.pop(0)
                features.write(part, *_encode_part(encoder, index, features.images(part)))
            rounds += 1
            if missing and rank_info.rank == 0 and rounds % log_every == 0:
                percent = min(100, 100 * rounds * size / len(missing))
                log.info("the vision tower has encoded %.0f%% of the images", percent)
    assert not features.missing(), "every part is assigned to a rank"
    return features


def _encode_part(encoder: VisionEncoder, index: SampleIndex, images: range) -> tuple[np.ndarray, dict[int, str]]:
    bad: dict[int, str] = {}
    encoded = []
    with ThreadPoolExecutor(DECODER_THREADS) as pool:
        for numbers in _batches(images, index, encoder.rules):
            decoded = list(pool.map(lambda number: _load_patches(number, index, encoder.rules), numbers))
            for number, (_, _, why) in zip(numbers, decoded, strict=True):
                bad |= {number: why} if why else {}
            patches = torch.from_numpy(np.concatenate([each for each, _, _ in decoded]))
            grids = torch.from_numpy(np.concatenate([each for _, each, _ in decoded]))
            encoded.append(encoder.encode(patches, grids))
    features = torch.cat(encoded)
    return (features.view(torch.uint16) if features.dtype == torch.bfloat16 else features).numpy(), bad


def _load_patches(number: int, index: SampleIndex, rules: ImageRules) -> tuple[np.ndarray, np.ndarray, str]:
    width, height = index.image_sizes[number].tolist()
    grids = grids_of((width, height), rules)
    patches = np.zeros((int(grids.prod(1).sum()), 3 * rules.frames * rules.patch**2), dtype=np.uint8)
    try:
        fill_patches(index.image_bytes(number), (width, height), rules, patches)
    except Exception as error:
        return patches, grids, f"{type(error).__name__}: {error}"[:300]
    return patches, grids, ""


def _batches(numbers: Sequence[int], index: SampleIndex, rules: ImageRules) -> Iterator[list[int]]:
    """Yield batches of images, each for one forward of the tower."""
    sizes = measure_images(index.image_sizes[numbers[0] : numbers[-1] + 1], rules).patches
    batch: list[int] = []
    total = 0
    for number, patches in zip(numbers, sizes.tolist(), strict=True):
        if batch and total + patches > MAX_PATCHES:
            yield batch
            batch, total = [], 0
        batch.append(number)
        total += patches
    yield batch


class CachedFeatures(Feature):
    """Trains on features of a frozen vision tower that are computed once."""

    def wrap_load(self, load: Load, context: LoadContext) -> Load:
        recipe, network, progress = context.recipe, context.networks[0], context.report_progress
        features = partial(build_feature_cache, recipe, context.plan, context.rank_info, report_progress=progress)
        load = partial(load_training_data, recipe, network, cache=context.cache, report_progress=progress)
        return partial(load, cache_features=features)


FEATURE = CachedFeatures()
