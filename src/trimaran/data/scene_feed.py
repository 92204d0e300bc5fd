"""Batches of simulated scenes, in the order of the seed. Runs in loader processes: without torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from trimaran.core import DataSection
from trimaran.core.scene_rules import BOX_NUMBERS, SceneRules
from trimaran.data.feed import DataShare, LoadedArrays
from trimaran.data.sample_order import positions
from trimaran.data.simulated_scenes import SimulatedScene, make_scene

NUM_SCENES = 100_000  # of an epoch; none is stored
SCENES_SEED = 0  # of the scenes themselves: another train.seed sees the same ones in another order
VERSION = 1  # of what is simulated; more when a scene of the same number looks different


@dataclass(frozen=True, slots=True)
class SceneRange:
    """Scenes `first` to `last` (exclusive); a scene's number is its id."""

    rules: SceneRules
    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first


class SceneFeed:
    """See `feed.Feed`. A sample is a scene. The `scenes` must not be none.

    One that is left out keeps its row, which is then dark, empty and not `valid`.
    """

    def __init__(
        self, scenes: SceneRange, *, seed: int, share: DataShare, quarantined: frozenset[int] = frozenset()
    ) -> None:
        assert len(scenes) > 0
        self._scenes, self._seed, self._quarantined = scenes, seed, quarantined
        self.share = share

    def load(self, step: int, at: Callable[[int], None]) -> LoadedArrays:
        scenes, valid = [], []
        for number in self.samples(step, [self.share.rank]):
            at(number)
            valid.append(number not in self._quarantined)
            scenes.append(make_scene(SCENES_SEED, number, self._scenes.rules) if valid[-1] else self._nothing())
        shape, size = (self.share.grad_accum, self.share.micro_batch), self.share.micro_batch
        cameras, grounds = (np.stack([getattr(each, name) for each in scenes]) for name in ("cameras", "segmentation"))
        arrays = {
            "cameras": cameras.reshape(*shape, *cameras.shape[1:]),
            "segmentation": grounds.reshape(*shape, *grounds.shape[1:]),
            "valid": np.array(valid).reshape(shape),
        }
        cuts: dict[str, tuple[int, ...]] = {}
        for name, rows in (("points", "point_rows"), ("boxes", "box_rows")):
            pieces = [getattr(each, name) for each in scenes]
            counts = np.array([len(each) for each in pieces])
            ends = np.concatenate([[0], counts.cumsum()])[::size]
            arrays[name] = np.concatenate(pieces)
            arrays[rows] = np.repeat(np.arange(len(scenes), dtype=np.int32) % size, counts)
            cuts[name] = cuts[rows] = tuple(ends.tolist())
        facts = {"points": float(len(arrays["points"])), "objects": float(len(arrays["boxes"]))}
        return LoadedArrays(arrays=arrays, num_valid=sum(valid), cuts=cuts, facts=facts)

    def samples(self, step: int, data_ranks: Sequence[int]) -> tuple[int, ...]:
        shares = [replace(self.share, rank=rank) for rank in data_ranks]
        indices = np.concatenate([share.indices(step).ravel() for share in shares])
        found = self._scenes.first + positions(self._seed, indices, len(self._scenes))
        return tuple(found.tolist())

    def num_quarantined(self, step: int) -> int:
        left_out = self._quarantined
        return len(left_out.intersection(self.samples(step, range(self.share.dp)))) if left_out else 0

    def steps_in(self, epochs: float) -> int:
        """Return how many steps it takes to see so many epochs of the scenes; the last may be beyond their end."""
        return -(-round(epochs * len(self._scenes)) // self.share.global_batch)

    def _nothing(self) -> SimulatedScene:
        rules = self._scenes.rules
        return SimulatedScene(
            np.zeros((rules.cameras, 3, rules.height, rules.width), dtype=np.uint8),
            np.zeros((0, 4), dtype=np.float32),
            np.zeros((0, BOX_NUMBERS), dtype=np.float32),
            np.zeros((rules.cells, rules.cells), dtype=np.int64),
        )


def scene_feeds(
    section: DataSection,
    rules: SceneRules,
    *,
    seed: int,
    share: DataShare,
    quarantined: frozenset[int] = frozenset(),
) -> tuple[SceneFeed, SceneFeed | None]:
    """Return the scenes to train on, and the last `holdout` share of them, if any."""
    held = min(max(1, round(NUM_SCENES * section.holdout)), NUM_SCENES - 1) if section.holdout > 0 else 0
    training = SceneRange(rules, 0, NUM_SCENES - held)
    holdout = SceneRange(rules, NUM_SCENES - held, NUM_SCENES)
    feed = SceneFeed(training, seed=seed, share=share, quarantined=quarantined)
    return feed, SceneFeed(holdout, seed=seed, share=share) if held else None


def scenes_digest(rules: SceneRules) -> str:
    """Return what tells these scenes from any others."""
    return f"scenes-{VERSION}-{SCENES_SEED}-{NUM_SCENES}-{rules}"
