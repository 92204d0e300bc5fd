"""Fills the cache of what a frozen vision tower makes of the images, before training."""

import hashlib
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from trimaran.core import ImageRules, Plan, Recipe, UserError
from trimaran.core.units import show_bytes
from trimaran.data.feature_cache import BF16, FeatureStore, put_file, refuse_trained
from trimaran.data.samples.sample_index import SampleIndex
from trimaran.data.vision.image_grid import grids_of, measure_images
from trimaran.data.vision.patches import fill_patches
from trimaran.models import model_folder, spec_of, weight_files
from trimaran.models.vlm_spec import VlmSpec
from trimaran.nets import Network, initialise, network_of
from trimaran.nets.patch_layout import empty_group
from trimaran.nets.vlm_model import Vlm
from trimaran.parallel import override_precision
from trimaran.parallel.precision import autocast
from trimaran.train.agreement import Poll
from trimaran.train.process.rank_info import RankInfo

log = logging.getLogger(__name__)

MAX_PATCHES = 1 << 14  # that go through the tower at a time
DECODERS = 4  # threads; decoding lets others run
KEY_CHARACTERS = 32
TOLD = 10  # times or so that the log says how far it is
KEPT = {torch.float32: np.dtype(np.float32), torch.bfloat16: BF16, torch.float16: np.dtype(np.float16)}


@dataclass
class Encoder:
    """The recipe's vision tower, whole and frozen, on one rank: it fits, and so no rank has to wait for another."""

    recipe: Recipe
    plan: Plan
    place: RankInfo
    rules: ImageRules

    @cached_property
    def network(self) -> Network:
        spec = spec_of(self.recipe.model)
        assert isinstance(spec, VlmSpec), "nothing else has images"
        with torch.device("meta"):
            network = network_of(spec, range(spec.vision.layers))
        # As the run computes: the same modules in the same arithmetic, and the weights that every plan starts from.
        override_precision(network, self.recipe.train.precision, self.place.device)
        network.module.to_empty(device=self.place.device)
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
        """Return what the projector takes in for these images, [tokens, width], on the host, as the tower left it."""
        module = self.network.module
        assert isinstance(module, Vlm)
        with autocast(self.plan, self.place.device):
            return module.encode(patches.to(self.place.device), grids.to(self.place.device)).cpu()

    def probe(self) -> Tensor:
        """Return the features of one black group: as wide as all, and of the same dtype."""
        module = self.network.module
        assert isinstance(module, Vlm)
        return self.encode(*empty_group(module.spec.vision, self.rules.merge, self.place.device))

    def digest(self) -> str:
        """Return what tells the weights of this tower from all others."""
        found = hashlib.sha256()
        for name, parameter in sorted(self.network.module.named_parameters()):
            found.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
            found.update(parameter.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().data)
        return found.hexdigest()


def keep_features(  # noqa: PLR0913 - a run, and its images
    recipe: Recipe,
    plan: Plan,
    place: RankInfo,
    index: SampleIndex,
    rules: ImageRules,
    cache: Path,
    *,
    beat: Callable[[], None] = lambda: None,
) -> FeatureStore:
    """Return the features of all images of the index, computed where they are not known yet.

    Every rank calls it. The ranks share the work, part by part; where they do not share a disk, those of each machine
    do what the others have put on theirs. `beat` is called now and then, to show that this may take long and goes on.
    """
    refuse_trained(recipe)
    encoder = Encoder(recipe, plan, place, rules)
    store = _store(encoder, index, cache)
    for turn, turns in ((place.rank, place.world_size), (place.local_rank, place.local_world_size)):
        todo = store.missing()
        _refuse_full(store, todo, cache)
        mine, rounds, told = todo[turn::turns], 0, max(1, len(todo) // (turns * TOLD))
        # In step, so that nobody is waited for longer than a part takes.
        while Poll(bool(mine)).wait():
            beat()
            if mine:
                part = mine.pop(0)
                store.write(part, *_part(encoder, index, store.images(part)))
            rounds += 1
            if todo and place.rank == 0 and rounds % told == 0:
                log.info("the vision tower has seen %.0f%% of the images", min(100, 100 * rounds * turns / len(todo)))
    assert not store.missing(), "every part was somebody's"
    return store


def _store(encoder: Encoder, index: SampleIndex, cache: Path) -> FeatureStore:
    """Return where the features are or will be. Rank 0 finds out and tells: it is the same weights everywhere."""
    spec = spec_of(encoder.recipe.model)
    assert isinstance(spec, VlmSpec)
    words = bytearray(KEY_CHARACTERS + 1)
    if dist.get_rank() == 0:
        arithmetic = [encoder.plan.precision, sorted(encoder.recipe.train.precision.items())]
        facts = [encoder.digest(), index.digest, asdict(encoder.rules), arithmetic]
        words[:-1] = hashlib.sha256(repr(facts).encode()).hexdigest()[:KEY_CHARACTERS].encode()
        words[-1] = [*KEPT].index(_dtype(encoder, cache / "features" / words[:-1].decode()))
    dist.broadcast(torch.frombuffer(words, dtype=torch.uint8), src=0)
    dtype, tokens = [*KEPT.values()][words[-1]], measure_images(index.image_sizes, encoder.rules).tokens
    return FeatureStore(cache / "features" / words[:-1].decode(), tokens, width=spec.feature_width, dtype=dtype)


def _dtype(encoder: Encoder, folder: Path) -> torch.dtype:
    """Return in which numbers the tower speaks, as it was noted or else as it is found now."""
    names = {str(dtype): dtype for dtype in KEPT}
    note = folder / "dtype"
    if not note.exists():
        folder.mkdir(parents=True, exist_ok=True)
        put_file(note, str(encoder.probe().dtype).encode())
    return names[note.read_text(encoding="utf-8")]


def _part(encoder: Encoder, index: SampleIndex, images: range) -> tuple[np.ndarray, dict[int, str]]:
    """Return the features of a part's images, and why some have none."""
    bad: dict[int, str] = {}
    found = []
    with ThreadPoolExecutor(DECODERS) as pool:
        for numbers in _handfuls(images, index, encoder.rules):
            looked = list(pool.map(lambda number: _patches(number, index, encoder.rules), numbers))
            for number, (_, _, why) in zip(numbers, looked, strict=True):
                bad |= {number: why} if why else {}
            patches = torch.from_numpy(np.concatenate([each for each, _, _ in looked]))
            grids = torch.from_numpy(np.concatenate([each for _, each, _ in looked]))
            found.append(encoder.encode(patches, grids))
    features = torch.cat(found)
    return (features.view(torch.uint16) if features.dtype == torch.bfloat16 else features).numpy(), bad


def _patches(number: int, index: SampleIndex, rules: ImageRules) -> tuple[np.ndarray, np.ndarray, str]:
    """Return an image's patches, its grids, and why it cannot be seen, if so."""
    width, height = index.image_sizes[number].tolist()
    grids = grids_of((width, height), rules)
    patches = np.zeros((int(grids.prod(1).sum()), 3 * rules.patch**2), dtype=np.uint8)
    try:
        fill_patches(index.image_bytes(number), (width, height), rules, patches)
    except Exception as error:
        return patches, grids, f"{type(error).__name__}: {error}"[:300]
    return patches, grids, ""


def _handfuls(numbers: Sequence[int], index: SampleIndex, rules: ImageRules) -> Iterator[list[int]]:
    """Yield the images, as many at a time as go through the tower together."""
    sizes = measure_images(index.image_sizes[numbers[0] : numbers[-1] + 1], rules).patches
    handful: list[int] = []
    total = 0
    for number, patches in zip(numbers, sizes.tolist(), strict=True):
        if handful and total + patches > MAX_PATCHES:
            yield handful
            handful, total = [], 0
        handful.append(number)
        total += patches
    yield handful


def _refuse_full(store: FeatureStore, todo: Sequence[int], cache: Path) -> None:
    need = sum(map(store.num_bytes, todo))
    cache.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(cache).free
    # All ranks must agree, or those with room would wait for those without.
    if Poll(need > free).wait():
        raise UserError("T063", f"the features of all images need {show_bytes(need)}, and the cache folder has "
                        f"{show_bytes(free)} left", where="data.samples.cache_features",
                        fix="set it to false, make data.samples.max_pixels smaller, or use a larger disk: "
                        "TRIMARAN_CACHE")  # fmt: skip
