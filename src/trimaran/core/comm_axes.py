"""The axes over which the ranks of a plan communicate, and what the prediction says about each."""

from trimaran.core.plan import AXES, Plan

WORLD = "world"  # all ranks: the sums of a step, such as its loss and its tokens
DATA_AXES = ("dp_replicate", "dp_shard")
# The axis of what is sent inside layers and between stages, by the first words of the prediction's terms.
_PAYLOAD_AXES = {
    "tensor slices": "tp",
    "gradients of images": "tp",
    "parts of the sequence": "cp",
    "experts": "ep",
    "between stages": "pp",
    "weights of replicas": "dp_replicate",
    "sums of the step": WORLD,
    "waiting for the slowest rank": WORLD,
}
_DATA_PAYLOADS = ("all-gather of weights", "gradients", "copies of gathered weights")


def comm_axes(plan: Plan) -> tuple[str, ...]:
    """Return the axes over which the ranks wait for each other; none for a single rank."""
    if plan.mesh.world_size == 1:
        return ()
    return *(axis for axis in AXES if getattr(plan.mesh, axis) > 1), WORLD


def data_axis(plan: Plan) -> str:
    """Return the axis that the exchange of weights and gradients between data ranks counts for.

    It may span several axes at once: shards lie on context-parallel ranks, too, and replicas add up the same gradients.
    Then it counts for the first of them.
    """
    is_sharded = plan.sharding != "none" or any((each.sharding or "none") != "none" for each in plan.towers.values())
    order = ("dp_shard", "cp", "dp_replicate", "tp") if is_sharded else ("dp_replicate", "dp_shard", "cp")
    return next((axis for axis in order if getattr(plan.mesh, axis) > 1), WORLD)


def predicted_comm(plan: Plan) -> dict[str, float]:
    """Return the predicted seconds of a step that a rank waits, by axis; empty without a prediction.

    The time by which collectives slow down computing is not among them: a run measures it as forward and backward.
    """
    if plan.prediction is None:
        return {}
    seconds = dict.fromkeys(comm_axes(plan), 0.0)
    for term, value in plan.prediction.exposed.items():
        payload = term.partition(" on ")[0]
        axis = data_axis(plan) if payload in _DATA_PAYLOADS else _PAYLOAD_AXES.get(payload)
        if axis in seconds:
            seconds[axis] += value
    if "pp" in seconds:
        seconds["pp"] += plan.prediction.time.get("bubble", 0.0)
    return seconds
