"""Relative cost of tokens and patches, for balancing rows over ranks; not a prediction of seconds."""

from trimaran.core import RowCost
from trimaran.models.outline import Outline, OutlineLayer, Tower


def row_cost(outline: Outline) -> RowCost:
    """Return the forward and backward FLOPs of a sample's parts, relative to one language token.

    The projector is counted with the patches that it merges.
    """
    main = outline.main
    token, token_pair = _arithmetic(main, outline)
    token += 2.0 * main.head_parameters * (1 + main.is_head_trained + outline.has_backward(main))
    patch = patch_pair = 0.0
    before = [tower for tower in outline.towers if tower is not main]
    for tower in before:
        linear, pair = _arithmetic(tower, outline)
        # A tower with fewer positions than the first one has merged them.
        position_ratio = tower.positions / before[0].positions if before[0].positions else 1.0
        patch, patch_pair = patch + linear * position_ratio, patch_pair + pair
    return RowCost(token_pair=token_pair / token, patch=patch / token, patch_pair=patch_pair / token)


def _arithmetic(tower: Tower, outline: Outline) -> tuple[float, float]:
    """Return the FLOPs of one position of a tower, and those for each position that it attends to."""
    linear = pair = 0.0
    passes, has_backward = outline.passes(tower), outline.has_backward(tower)
    for block, count in tower.runs:
        if isinstance(block, OutlineLayer):
            linear += 2.0 * (passes * block.active_weights + 3 * block.adapter_parameters()) * count
            causal_fraction = 0.5 if block.causal else 1.0
            # A window bounds the number of keys: its cost is linear in the number of positions.
            pair_flops = (6.0 if has_backward else 2.0) * block.heads * (block.head_dim + block.value_dim) * count
            if block.window:
                linear += pair_flops * block.window
            else:
                pair += pair_flops * causal_fraction
        elif tower.positions:
            linear += passes * block.sample_flops * count / tower.positions
    return linear, pair
