"""Boxes and ground: the losses of a perception model, and how much of a scene it got right."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trimaran.core.scene_rules import GROUND, SceneRules
from trimaran.data.step_batch import Inputs
from trimaran.models.perception_spec import BOX_OUTPUTS, PerceptionSpec
from trimaran.nets import Network
from trimaran.train.loss.objective import LossSums

BELL_CELLS = 0.7  # how far around an object's cell heat is only half wrong
BOX_WEIGHT, HEAT_WEIGHT = 1.0, 1.0
ROUND_OFF = 0.1  # below this a wrong number of a box loses less than in proportion
FOUND_METRES = 1.0  # from the centre of an object: then it is found
CONFIDENT = 0.3


class Answers(NamedTuple):
    """What a network says of each cell: heat [B, classes, X, Y], numbers [B, 8, X, Y], ground [B, grounds, X, Y]."""

    heat: Tensor
    numbers: Tensor
    ground: Tensor


class PerceptionObjective:
    """The loss of a scene is what it lost of heat and boxes for each of its objects, and of ground for each cell.

    Scenes are added up, so that every valid one counts alike, whatever rows share a batch (law 1).
    """

    parts = ("heat", "box", "segmentation")
    scores = ("recall", "precision", "cells", "road_iou")

    def __init__(self, spec: PerceptionSpec) -> None:
        self._rules, self._num_heats = spec.scenes(), spec.num_heats

    def losses(self, network: Network, output: Tensor, inputs: Inputs) -> LossSums:
        answers, valid = self._answers(output), inputs["valid"].float()
        boxes, rows = inputs["boxes"], inputs["box_rows"].long()
        ones = torch.ones(len(boxes), device=boxes.device)
        objects = valid.new_zeros(len(valid)).index_add(0, rows, ones).clamp(min=1)
        heat = self._heat_loss(answers.heat, boxes, rows) / objects
        box = torch.zeros_like(heat).index_add(0, rows, self._box_losses(answers.numbers, boxes, rows)) / objects
        ground = F.cross_entropy(answers.ground, inputs["segmentation"], reduction="none").mean(dim=(1, 2))
        found = torch.stack([HEAT_WEIGHT * heat, BOX_WEIGHT * box, ground]) * valid
        sums = found.sum(dim=1)
        count = valid.sum()
        return LossSums(sums.sum(), torch.stack([sums.detach(), count.expand(len(sums))], dim=1))

    @torch.no_grad()
    def score(self, network: Network, output: Tensor, inputs: Inputs) -> Tensor:
        """Return [hits, of how many] of each score. An object is found by a peak near its centre, of its class."""
        answers, valid, truth = self._answers(output), inputs["valid"], inputs["segmentation"]
        guess = answers.ground.argmax(dim=1)
        cells = valid[:, None, None].expand_as(truth)
        road = GROUND.index("road")
        both = ((guess == road) & (truth == road) & cells).sum()
        either = (((guess == road) | (truth == road)) & cells).sum()
        hits, num_found, num_there = self._matched(answers, inputs)
        rows = [
            [hits, num_there],
            [hits, num_found],
            [((guess == truth) & cells).sum(), cells.sum()],
            [both, either],
        ]
        return torch.stack([torch.stack(row) for row in rows]).double()

    def _answers(self, output: Tensor) -> Answers:
        heats = self._num_heats
        sizes = [heats, BOX_OUTPUTS, output.shape[1] - heats - BOX_OUTPUTS]
        return Answers(*output.float().split(sizes, dim=1))

    def _heat_loss(self, heat: Tensor, boxes: Tensor, rows: Tensor) -> Tensor:
        """Return the loss of each scene's heat, which should be 1 in the cell of an object and fall off around it.

        The focal loss of CenterNet: what is nearly right counts for little, near an object even what is wrong does.
        """
        wanted = self._wanted_heat(heat, boxes, rows)
        sure, unsure = F.logsigmoid(heat), F.logsigmoid(-heat)
        chance = heat.sigmoid()
        right = wanted == 1
        lost = torch.where(right, -sure * (1 - chance) ** 2, -unsure * chance**2 * (1 - wanted) ** 4)
        return lost.sum(dim=(1, 2, 3))

    def _wanted_heat(self, heat: Tensor, boxes: Tensor, rows: Tensor) -> Tensor:
        size = self._rules.cells
        places = _cells_of(boxes, self._rules).float()
        numbers = torch.arange(size, device=heat.device)
        squares = ((numbers[None, None] - places[:, :, None]) ** 2).unbind(1)
        bells = (-(squares[0][:, :, None] + squares[1][:, None, :]) / (2 * BELL_CELLS**2)).exp().flatten(1)
        owners = rows * self._num_heats + boxes[:, -1].long()
        wanted = heat.new_zeros(len(heat) * self._num_heats, size * size)
        wanted = wanted.scatter_reduce(0, owners[:, None].expand_as(bells), bells, "amax")
        return wanted.view_as(heat)

    def _box_losses(self, numbers: Tensor, boxes: Tensor, rows: Tensor) -> Tensor:
        """Return how far off the numbers of each box are, in the cell of its centre.

        Rounded off at the bottom. The slopes of a plain distance are 1 and -1, which cancel out but for rounding, and
        an optimizer that norms its steps would make whole steps of that, in another direction under every plan.
        """
        x, y = _cells_of(boxes, self._rules).unbind(1)
        off = numbers[rows, :, x, y] - box_numbers(boxes, self._rules)
        return ((off**2 + ROUND_OFF**2).sqrt() - ROUND_OFF).sum(dim=1)

    def _matched(self, answers: Answers, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        """Return how many objects were found, how many peaks there are, and how many objects.

        A peak and an object belong together when each is the other's nearest in its scene.
        """
        chance = answers.heat.sigmoid() * inputs["valid"][:, None, None, None]
        best, kinds = chance.max(dim=1)
        peaks = (best == F.max_pool2d(best[:, None], 3, 1, 1)[:, 0]) & (best > CONFIDENT)
        row, x, y = peaks.nonzero(as_tuple=True)
        inside = answers.numbers[row, :2, x, y]
        centres = (torch.stack([x, y], dim=1) + inside) * self._rules.cell - self._rules.reach
        boxes, box_rows = inputs["boxes"], inputs["box_rows"].long()
        if not len(row) or not len(boxes):
            nothing = torch.zeros((), dtype=torch.int64, device=best.device)
            return nothing, nothing + len(row), nothing + len(boxes)
        away = torch.cdist(centres, boxes[:, :2])
        away = away.masked_fill(row[:, None] != box_rows[None], math.inf)
        nearest = away.argmin(dim=1)
        mutual = away.argmin(dim=0)[nearest] == torch.arange(len(row), device=best.device)
        close = away.gather(1, nearest[:, None])[:, 0] <= FOUND_METRES
        same = kinds[row, x, y] == boxes[nearest, -1].long()
        return (mutual & close & same).sum(), peaks.sum(), peaks.new_zeros(()).long() + len(boxes)


def box_numbers(boxes: Tensor, rules: SceneRules) -> Tensor:
    """Return what is to be told of each of `boxes` [K, 8].

    Where in its cell the centre lies, its height, the logarithms of its sizes, and sine and cosine of twice the yaw: a
    box looks the same from both ends.
    """
    inside = (boxes[:, :2] + rules.reach) / rules.cell - _cells_of(boxes, rules)
    turned = 2 * boxes[:, 6:7]
    return torch.cat([inside, boxes[:, 2:3], boxes[:, 3:6].log(), turned.sin(), turned.cos()], dim=1)


def _cells_of(boxes: Tensor, rules: SceneRules) -> Tensor:
    return ((boxes[:, :2] + rules.reach) / rules.cell).floor().long().clamp(0, rules.cells - 1)
