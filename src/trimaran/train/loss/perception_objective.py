"""The losses and scores of a perception model: object boxes and ground segmentation."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trimaran.core import GROUND, OBJECTS, UNKNOWN_GROUND, SceneRules
from trimaran.data import Inputs
from trimaran.models import BOX_OUTPUTS
from trimaran.nets import Network
from trimaran.train.loss.objective import LossSums

HEAT_SIGMA_CELLS = 0.7  # of the Gaussian target around the cell of an object
BOX_WEIGHT, HEAT_WEIGHT = 1.0, 1.0
BOX_LOSS_SMOOTHING = 0.1  # errors below this are penalised quadratically
MAX_MATCH_METRES = 1.0  # between a predicted centre and that of the object
MIN_PEAK_PROBABILITY = 0.3


class PerceptionOutput(NamedTuple):
    """The output for each cell: heat [B, classes, X, Y], box values [B, 8, X, Y], ground [B, grounds, X, Y]."""

    heat: Tensor
    box_values: Tensor
    ground: Tensor


class PerceptionObjective:
    """The loss of a scene: mean heat and box loss of objects, plus mean ground loss of cells.

    Scenes are summed, so that each weighs the same in any batch.
    """

    part_names = ("heat", "box", "segmentation")
    score_names = ("recall", "precision", "cells", "road_iou")

    def __init__(self, rules: SceneRules) -> None:
        self._rules = rules

    def losses(self, network: Network, output: Tensor, inputs: Inputs) -> LossSums:
        cells, valid = self._split_output(output), inputs["valid"].float()
        boxes, rows = inputs["boxes"], inputs["box_rows"].long()
        ones = torch.ones(len(boxes), device=boxes.device)
        objects = valid.new_zeros(len(valid)).index_add(0, rows, ones).clamp(min=1)
        heat = self._heat_loss(cells.heat, boxes, rows) / objects
        box = torch.zeros_like(heat).index_add(0, rows, self._box_losses(cells.box_values, boxes, rows)) / objects
        truth = inputs["segmentation"]
        ground = F.cross_entropy(cells.ground, truth, ignore_index=UNKNOWN_GROUND, reduction="none").sum(dim=(1, 2))
        ground = ground / (truth != UNKNOWN_GROUND).sum(dim=(1, 2)).clamp(min=1)  # 0 for a scene without ground truth
        losses = torch.stack([HEAT_WEIGHT * heat, BOX_WEIGHT * box, ground]) * valid
        sums = losses.sum(dim=1)
        count = valid.sum()
        return LossSums(sums.sum(), torch.stack([sums.detach(), count.expand(len(sums))], dim=1))

    @torch.no_grad()
    def score(self, network: Network, output: Tensor, inputs: Inputs) -> Tensor:
        """Return [correct, total] of each score. A peak finds an object if it is near its centre and of its class."""
        predicted, valid, truth = self._split_output(output), inputs["valid"], inputs["segmentation"]
        ground = predicted.ground.argmax(dim=1)
        cells = valid[:, None, None] & (truth != UNKNOWN_GROUND)
        road = GROUND.index("road")
        both = ((ground == road) & (truth == road) & cells).sum()
        either = (((ground == road) | (truth == road)) & cells).sum()
        num_matches, num_peaks, num_objects = self._match_objects(predicted, inputs)
        rows = [
            [num_matches, num_objects],
            [num_matches, num_peaks],
            [((ground == truth) & cells).sum(), cells.sum()],
            [both, either],
        ]
        return torch.stack([torch.stack(row) for row in rows]).double()

    def _split_output(self, output: Tensor) -> PerceptionOutput:
        heats = len(OBJECTS)
        sizes = [heats, BOX_OUTPUTS, output.shape[1] - heats - BOX_OUTPUTS]
        return PerceptionOutput(*output.float().split(sizes, dim=1))

    def _heat_loss(self, heat: Tensor, boxes: Tensor, rows: Tensor) -> Tensor:
        """Return CenterNet's focal loss of each scene. The target is 1 in an object's cell and falls off around it."""
        size = self._rules.cells
        centres = _cells_of(boxes, self._rules).float()
        indices = torch.arange(size, device=heat.device)
        squares = ((indices[None, None] - centres[:, :, None]) ** 2).unbind(1)
        gaussians = (-(squares[0][:, :, None] + squares[1][:, None, :]) / (2 * HEAT_SIGMA_CELLS**2)).exp().flatten(1)
        channels = rows * len(OBJECTS) + boxes[:, -1].long()
        target = heat.new_zeros(len(heat) * len(OBJECTS), size * size)
        target = target.scatter_reduce(0, channels[:, None].expand_as(gaussians), gaussians, "amax")
        target = target.view_as(heat)
        log_positive, log_negative = F.logsigmoid(heat), F.logsigmoid(-heat)
        probability = heat.sigmoid()
        is_centre = target == 1
        loss = torch.where(
            is_centre, -log_positive * (1 - probability) ** 2, -log_negative * probability**2 * (1 - target) ** 4
        )
        return loss.sum(dim=(1, 2, 3))

    def _box_losses(self, box_values: Tensor, boxes: Tensor, rows: Tensor) -> Tensor:
        """Return the error of each box's values, in the cell of its centre: a pseudo-Huber loss.

        The gradients of a plain L1 loss are 1 and -1. They cancel except for rounding, and an optimizer that normalises
        its updates would amplify that rounding differently under every plan.
        """
        x, y = _cells_of(boxes, self._rules).unbind(1)
        error = box_values[rows, :, x, y] - box_targets(boxes, self._rules)
        return ((error**2 + BOX_LOSS_SMOOTHING**2).sqrt() - BOX_LOSS_SMOOTHING).sum(dim=1)

    def _match_objects(self, predicted: PerceptionOutput, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        """Return the numbers of matches (mutually nearest in a scene), of peaks, and of objects."""
        probability = predicted.heat.sigmoid() * inputs["valid"][:, None, None, None]
        best, classes = probability.max(dim=1)
        peaks = (best == F.max_pool2d(best[:, None], 3, 1, 1)[:, 0]) & (best > MIN_PEAK_PROBABILITY)
        row, x, y = peaks.nonzero(as_tuple=True)
        offsets = predicted.box_values[row, :2, x, y]
        centres = (torch.stack([x, y], dim=1) + offsets) * self._rules.cell - self._rules.reach
        boxes, box_rows = inputs["boxes"], inputs["box_rows"].long()
        if not len(row) or not len(boxes):
            zero = torch.zeros((), dtype=torch.int64, device=best.device)
            return zero, zero + len(row), zero + len(boxes)
        distances = torch.cdist(centres, boxes[:, :2])
        distances = distances.masked_fill(row[:, None] != box_rows[None], math.inf)
        nearest = distances.argmin(dim=1)
        mutual = distances.argmin(dim=0)[nearest] == torch.arange(len(row), device=best.device)
        close = distances.gather(1, nearest[:, None])[:, 0] <= MAX_MATCH_METRES
        same_class = classes[row, x, y] == boxes[nearest, -1].long()
        return (mutual & close & same_class).sum(), peaks.sum(), peaks.new_zeros(()).long() + len(boxes)


def box_targets(boxes: Tensor, rules: SceneRules) -> Tensor:
    """Return the targets [K, 8] of `boxes`: offset in the cell, height, log sizes, sine and cosine of twice the yaw.

    A box turned by 180 degrees is the same.
    """
    offset = (boxes[:, :2] + rules.reach) / rules.cell - _cells_of(boxes, rules)
    double_yaw = 2 * boxes[:, 6:7]
    return torch.cat([offset, boxes[:, 2:3], boxes[:, 3:6].log(), double_yaw.sin(), double_yaw.cos()], dim=1)


def _cells_of(boxes: Tensor, rules: SceneRules) -> Tensor:
    return ((boxes[:, :2] + rules.reach) / rules.cell).floor().long().clamp(0, rules.cells - 1)
