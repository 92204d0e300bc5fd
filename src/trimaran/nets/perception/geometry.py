"""Where each cell of the ground is seen in the images."""

import math

import torch
from torch import Tensor

from trimaran.core.scene_rules import CAMERA_METRES, SceneRules

LOOKED_AT_METRES = 0.6  # above the ground: the middle of most that stands there
LEAST = -20.0  # as good as nothing; far less would make numbers so small that a CPU crawls
ROWS_WIDER = 2.0  # a cell is looked for in more rows than columns: what stands there may be low or tall


def sight_bias(rules: SceneRules, grid: tuple[int, int], device: torch.device) -> Tensor:
    """Return what is added to the score of each cell and token [cells * cells, cameras * rows * columns], in fp32.

    A cell looks into the direction in which it lies, and a token farther from it counts for less, as in a bell curve
    as wide as a token. Computed anew in each forward: no table that a meta device or a cast could spoil.
    """
    rows, columns = grid
    right = (torch.arange(columns, device=device) + 0.5) * (rules.width / columns) - rules.width / 2
    down = (torch.arange(rows, device=device) + 0.5) * (rules.height / rows) - rules.horizon
    headings = torch.tensor(rules.headings, device=device)
    azimuths = headings[:, None, None] - (right / rules.focal).atan()[None, None, :]
    # A column's pixels lie farther from the camera the farther it is from the middle.
    slopes = down[:, None] / (right**2 + rules.focal**2).sqrt()[None, :]
    azimuths, slopes = torch.broadcast_tensors(azimuths, slopes[None])
    middles = (torch.arange(rules.cells, device=device) + 0.5) * rules.cell - rules.reach
    x, y = torch.meshgrid(middles, middles, indexing="ij")
    away = torch.hypot(x, y).flatten().clamp(min=rules.cell)
    turned = torch.atan2(y, x).flatten()[:, None] - azimuths.flatten()[None]
    turned = (turned + math.pi).remainder(2 * math.pi) - math.pi
    lower = ((CAMERA_METRES - LOOKED_AT_METRES) / away)[:, None] - slopes.flatten()[None]
    wide = rules.width / columns / rules.focal
    tall = ROWS_WIDER * rules.height / rows / rules.focal
    return (-((turned / wide) ** 2 + (lower / tall) ** 2) / 2).clamp(min=LEAST)
