"""What would change the answer: each change was searched before it is told."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from trimaran.core import Bytes, Mesh, Plan, show_bytes
from trimaran.hardware import Cluster
from trimaran.models import Outline
from trimaran.planner.branch_and_bound import find
from trimaran.planner.evaluator import Evaluator
from trimaran.planner.least_memory import fits_on, resized
from trimaran.planner.question import Question
from trimaran.planner.space import Space

WORTH = 1.03  # a change that gains less is not told


class Hint(NamedTuple):
    """Another question, in words. A step of it trains on as many tokens."""

    words: str
    question: Question


def hints_for(best: Plan, question: Question) -> tuple[str, ...]:
    """Return what would make the best plan faster, and by how much: searched with the mesh that won."""
    assert best.prediction is not None
    told = []
    for change in changes(question):
        seconds = near(change.question, best)
        if seconds is not None and (gain := best.prediction.step_seconds / seconds) > WORTH:
            told.append(f"{change.words}: {gain:.2f} times as fast")
    return (*told, *_room(best, question))


def ways_out(question: Question) -> tuple[str, ...]:
    """Return the changes, but for more devices, after which a plan fits."""
    cluster = question.cluster
    roomy = replace(cluster, host_bytes=Bytes(2 * cluster.host_bytes))
    hosts = Hint(f"use nodes with {show_bytes(roomy.host_bytes)} of memory", replace(question, cluster=roomy))
    others = [change for change in changes(question) if change.question.cluster == cluster]
    return tuple(
        f"{change.words}: a plan fits"
        for change in [*_unpinned(question), *([hosts] if cluster.device.kind == "cuda" else []), *others]
        if fits_on(change.question, change.question.cluster)
    )


def changes(question: Question) -> Iterator[Hint]:
    """Yield what a person could change: the cluster, precision, states, sequences, what is trained."""
    recipe, cluster, pins = question.recipe, question.cluster, question.pins
    if (larger := _larger(question)) is not None:
        yield Hint(f"use {larger}", replace(question, cluster=larger))
    train = recipe.train
    if train.optimizer.states == "fp32" and pins.engine == "torch":
        small = train.model_copy(update={"optimizer": train.optimizer.model_copy(update={"states": "8bit"})})
        yield Hint("set train.optimizer.states to 8bit", _with(question, train=small))
    if "precision" not in pins.model_fields_set and "fp8" in cluster.device.peak_flops:
        fp8 = _with(question, plan=_pinned(pins, precision="fp8"))
        yield Hint("set plan.precision to fp8, which changes the course a little", fp8)
    assert question.outline is not None
    if recipe.data.seq_len >= 2048 and not question.outline.main.positions:
        half = recipe.data.model_copy(update={"seq_len": recipe.data.seq_len // 2})
        shorter = train.model_copy(update={"global_batch": 2 * train.global_batch})
        words = f"cut sequences to {recipe.data.seq_len // 2:,}, and twice as many"
        yield Hint(words, _with(question, data=half, train=shorter))
    for tower in question.outline.towers[:-1]:
        if not tower.frozen and tower.layers > 2:
            yield Hint(f"freeze {tower.name}", replace(question, outline=frozen(question.outline, tower.name)))


def _larger(question: Question) -> Cluster | None:
    """Return the next larger cluster over which the batch splits: a fuller node, or more nodes, up to twice as many."""
    cluster, batch = question.cluster, question.recipe.train.global_batch
    node = cluster.devices_per_node
    if cluster.device.kind != "cuda":
        return None
    if cluster.num_nodes == 1 and 2 * node <= cluster.device.node_size:
        return resized(cluster, 1, 2 * node)
    nodes = range(cluster.num_nodes + 1, 2 * cluster.num_nodes + 1)
    return next((resized(cluster, num, node) for num in nodes if batch % num == 0), None)


def _unpinned(question: Question) -> Iterator[Hint]:
    """Yield the question with one pin less."""
    pins = question.pins
    for name in sorted(pins.model_fields_set):
        kept = {each: getattr(pins, each) for each in pins.model_fields_set - {name}}
        yield Hint(f"leave plan.{name} out", _with(question, plan=Plan(**kept)))


def frozen(outline: Outline, name: str) -> Outline:
    """Return the network with that tower frozen."""
    towers = tuple(replace(each, frozen=True) if each.name == name else each for each in outline.towers)
    return replace(outline, towers=towers)


def near(question: Question, best: Plan) -> float | None:
    """Return the seconds of the fastest plan that cuts the network as `best` does; None where none fits or can run."""
    mesh, pins = best.mesh, question.pins
    cut = Mesh(
        **pins.mesh.model_dump(exclude_unset=True) | {"tp": mesh.tp, "pp": mesh.pp, "cp": mesh.cp, "ep": mesh.ep}
    )
    held: dict[str, Any] = {"mesh": cut}
    if mesh.pp > 1:
        held["pipeline"] = best.pipeline
    if best.mesh.dp > 1 and "sharding" not in pins.model_fields_set:
        held["sharding"] = best.sharding
    asked = _with(question, plan=_pinned(pins, **held))
    space = Space(asked)
    found = find(space, Evaluator(space)).ranked()
    return found[0].seconds if found else None


def _room(best: Plan, question: Question) -> Iterator[str]:
    """Yield what is left free, where that is much: a smaller device would do."""
    assert best.prediction is not None
    size, used = question.cluster.device.memory_bytes, best.prediction.device_bytes
    if used < 0.5 * size and question.cluster.device.kind == "cuda":
        yield f"{show_bytes(size - used)} of each device stay free"


def _with(question: Question, **sections: object) -> Question:
    return replace(question, recipe=question.recipe.model_copy(update=sections))


def _pinned(pins: Plan, **fields: Any) -> Plan:
    """Return the pins with these besides."""
    kept: dict[str, Any] = {name: getattr(pins, name) for name in pins.model_fields_set}
    return Plan(**kept | fields)
