"""Hints: the smallest cluster on which a plan fits, and what would change the answer. Each is searched first."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from trimaran.core import AdapterSection, Bytes, Mesh, Plan, TemplateText, show_bytes, templated
from trimaran.core.plan import Comm
from trimaran.core.replica_sync import LocalSteps, OuterOptimizer
from trimaran.cost.peak_memory import Memory
from trimaran.machine import Cluster
from trimaran.models import Outline, OutlineLayer, with_adapter
from trimaran.planner.question import Question
from trimaran.planner.rules.legal import is_legal
from trimaran.planner.search.branch_and_bound import least_memory_plans
from trimaran.planner.search.evaluator import PlanEvaluator
from trimaran.planner.search.rejections import ranked_by_risk
from trimaran.planner.search.space import Space

MAX_DEVICES = 16_384
MAX_NODE_COUNTS_TRIED = 16  # one after the other


class LeastMemory(NamedTuple):
    """A plan, its memory, and the fraction of the available memory that it needs. Above 1 it does not fit."""

    memory_use: float
    plan: Plan
    memory: Memory


def least_memory_plan(space: Space, evaluator: PlanEvaluator, *, stop_at_fit: bool = False) -> LeastMemory | None:
    """Return the legal plan with the least memory, or the first that fits (`stop_at_fit`); None if there is none."""
    best, best_rank = None, (True, math.inf, 0)
    for plan in least_memory_plans(space):
        memory = evaluator.memory(plan)
        memory_use = evaluator.memory_use(memory)
        rank = memory_use > 1, round(memory_use, 2), memory.device  # device memory decides if all exceed the host alike
        if (best is None or rank < best_rank) and is_legal(plan, space.question):
            best, best_rank = LeastMemory(memory_use, plan, memory), rank
            if stop_at_fit and memory_use <= 1:
                break
    return best


def smallest_cluster(question: Question) -> Cluster | None:
    """Return the smallest cluster of the question's devices on which a plan fits; None if none does."""
    sizes = cluster_sizes(question.cluster, most=MAX_DEVICES)
    return first_that_fits(question, (each for each in sizes if each.world_size > question.cluster.world_size))


def first_that_fits(question: Question, clusters: Iterable[Cluster]) -> Cluster | None:
    """Return the first cluster on which a plan fits, or a smaller one after the last that failed; None if none fits.

    The clusters come smallest first. More nodes have more memory, as long as the batch splits over them: a long
    interval is bisected, and at the end every number of nodes is tried.
    """
    fails = 0
    for cluster in clusters:
        if fits_on(question, cluster):
            break
        fails = cluster.num_nodes
    else:
        return None
    while cluster.num_nodes - fails > MAX_NODE_COUNTS_TRIED:
        middle = resized_cluster(cluster, (fails + cluster.num_nodes) // 2, cluster.devices_per_node)
        if fits_on(question, middle):
            cluster = middle
        else:
            fails = middle.num_nodes
    between = (resized_cluster(cluster, num, cluster.devices_per_node) for num in range(fails + 1, cluster.num_nodes))
    return next((each for each in between if fits_on(question, each)), cluster)


def fits_on(question: Question, cluster: Cluster) -> bool:
    """Return whether any plan fits on that cluster."""
    space = Space(replace(question, cluster=cluster))
    best = least_memory_plan(space, PlanEvaluator(space), stop_at_fit=True)
    return best is not None and best.memory_use <= 1


def cluster_sizes(cluster: Cluster, *, most: int) -> Iterator[Cluster]:
    """Yield clusters of the same devices, smallest first: parts of a node, then round numbers of nodes."""
    node = (
        cluster.devices_per_node if cluster.num_nodes > 1 else max(cluster.devices_per_node, cluster.device.node_size)
    )
    yield from (resized_cluster(cluster, 1, each) for each in range(1, node) if node % each == 0)
    for num in range(1, most // node + 1):
        part = num // 3 if num % 3 == 0 else num
        if num <= 8 or num == cluster.num_nodes or num & (num - 1) == 0 or part & (part - 1) == 0:
            yield resized_cluster(cluster, num, node)


def resized_cluster(cluster: Cluster, num_nodes: int, devices_per_node: int) -> Cluster:
    """Return a cluster of that size with the same devices and links. The outermost link joins all nodes."""
    world = num_nodes * devices_per_node
    inner = tuple(link for link in cluster.links if link.devices < world)
    outer = next(
        (link for link in cluster.links if link.devices >= world), cluster.links[-1] if cluster.links else None
    )
    links = (*inner, replace(outer, devices=world)) if outer else ()
    return replace(cluster, num_nodes=num_nodes, devices_per_node=devices_per_node, links=links, groups=())


MIN_HINT_SPEEDUP = 1.03  # a smaller gain is not shown
# What changes the trajectory is shown only on slow links: from this much of a step in communication, and this gain.
MIN_COMM_FRACTION, MIN_INEXACT_SPEEDUP = 0.3, 1.3
INEXACT = "set {field} to {value}, which changes the results a little"
LOCAL_STEPS = range(50, 4, -1)  # that replicas may train alone, the first choice first


class Hint(NamedTuple):
    """A changed question, and its text. A step of it trains on as many tokens."""

    text: TemplateText
    question: Question


def hints_for(best: Plan, question: Question) -> tuple[TemplateText, ...]:
    """Return what would make the best plan faster, and by how much: searched with the same mesh."""
    assert best.prediction is not None
    hints = []
    for change in question_changes(question):
        seconds = fastest_like(change.question, best)
        if seconds is not None and (gain := best.prediction.step_seconds / seconds) > MIN_HINT_SPEEDUP:
            hints.append(templated("{hint}: {times} times as fast", hint=change.text, times=f"{gain:.2f}"))
    hints += _slow_link_hints(best, question)
    size, used = question.cluster.device.memory_bytes, best.prediction.device_bytes
    if used < 0.5 * size and question.cluster.device.traits.has_own_memory:  # a smaller device would be enough
        hints.append(templated("{size} of each device stay free", size=show_bytes(size - used)))
    return tuple(hints)


def _slow_link_hints(best: Plan, question: Question) -> Iterator[TemplateText]:
    """Yield the fastest compression and local steps. These need replicas, which a plan for slow links may not have."""
    assert best.prediction is not None
    seconds, comm = best.prediction.step_seconds, best.prediction.time.get("comm", 0.0)
    if comm < MIN_COMM_FRACTION * seconds or "comm" in question.pins.model_fields_set:
        return
    kinds = ("bf16", "int8", "powersgd") if best.mesh.dp > 1 else ()
    compressions = [(f"plan.comm.compression={kind}", {"comm": Comm(compression=kind)}) for kind in kinds]
    for what, settings in (
        (templated("compress gradients"), compressions),
        (templated("synchronise less often"), _local_steps(question)),
    ):
        found = {}
        for text, fields in settings:
            changed = _with(question, plan=_pinned(question.pins, **fields))
            found[text] = (_fastest(changed) if "mesh" in fields else fastest_like(changed, best)) or math.inf
        text = min(found, key=lambda each: found[each], default="")
        if text and (gain := seconds / found[text]) > MIN_INEXACT_SPEEDUP:
            yield templated(
                "{what} with --set {setting}, which changes the results: {times} times as fast",
                what=what,
                setting=text,
                times=f"{gain:.2f}",
            )


def _local_steps(question: Question) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield DiLoCo with a replica on each node, plain and with int8. Its local steps divide the steps of the run."""
    steps = next((each for each in LOCAL_STEPS if question.recipe.train.steps % each == 0), None)
    nodes, mesh = question.cluster.num_nodes, question.pins.mesh.model_dump(exclude_unset=True)
    if steps is None or nodes == 1 or mesh.get("dp_replicate", nodes) != nodes:
        return
    for compression in ("none", "int8"):
        local = LocalSteps(steps=steps, outer=OuterOptimizer(optimizer="nesterov"), compression=compression)
        text = f"{{steps: {steps}, outer: {{optimizer: nesterov}}, compression: {compression}}}"
        fields = {"mesh": Mesh(**mesh | {"dp_replicate": nodes}), "comm": Comm(local_steps=local)}
        yield f"plan.mesh.dp_replicate={nodes} --set 'plan.comm.local_steps={text}'", fields


def memory_hints(question: Question) -> tuple[TemplateText, ...]:
    """Return the changes, other than more devices, after which a plan fits."""
    cluster = question.cluster
    larger_host = replace(cluster, host_bytes=Bytes(2 * cluster.host_bytes))
    text = templated("use nodes with {size} of memory", size=show_bytes(larger_host.host_bytes))
    pins, changes = question.pins, []
    for name in sorted(pins.model_fields_set):
        fewer = Plan(**{each: getattr(pins, each) for each in pins.model_fields_set - {name}})
        changes.append(Hint(templated("leave plan.{field} out", field=name), _with(question, plan=fewer)))
    if cluster.device.traits.has_own_memory:
        changes.append(Hint(text, replace(question, cluster=larger_host)))
    changes += [change for change in question_changes(question) if change.question.cluster == cluster]
    hints = [
        templated("{hint}: a plan fits", hint=change.text)
        for change in changes
        if fits_on(change.question, change.question.cluster)
    ]
    for change in () if question.recipe.model.adapter else adapter_changes(question):
        space = Space(change.question)
        least = least_memory_plan(space, PlanEvaluator(space), stop_at_fit=True)
        if least and least.memory_use <= 1:
            size = show_bytes(least.memory.device)
            hints.append(templated("{hint}: a plan fits in {size} a device", hint=change.text, size=size))
            break
    return tuple(hints)


def adapter_changes(question: Question) -> Iterator[Hint]:
    """Yield the question with an adapter on frozen weights, of which another thing is trained; then with 4-bit ones."""
    outline = question.outline
    assert outline is not None
    model, main, on_gpu = question.recipe.model, outline.main, question.cluster.device.traits.has_kernels
    has_linears = all(isinstance(block, OutlineLayer) for block, _ in main.runs)
    if question.stack.name != "trimaran" or not has_linears:
        return
    changes: list[tuple[TemplateText, AdapterSection]] = []
    if model.adapter is None:
        settings = {"kind=lora": AdapterSection()} | ({"base=4bit": AdapterSection(base="4bit")} if on_gpu else {})
        for setting, section in settings.items():
            field = f"model.adapter.{setting}"
            text = templated("train a LoRA adapter, not the whole model, with --set {setting}", setting=field)
            changes.append((text, section))
    elif model.adapter.base == "auto" and on_gpu:
        packed = model.adapter.model_copy(update={"base": "4bit"})
        changes = [(templated(INEXACT, field="model.adapter.base", value="4bit"), packed)]
    for text, section in changes:
        changed = _with(question, model=model.model_copy(update={"adapter": section}))
        yield Hint(text, replace(changed, outline=with_adapter(outline, section)))


def question_changes(question: Question) -> Iterator[Hint]:
    """Yield what the user could change: cluster, optimizer states, precision, sequence length, frozen towers."""
    recipe, cluster, pins = question.recipe, question.cluster, question.pins
    # A fuller node, or up to twice as many nodes, over which the batch splits.
    node = cluster.devices_per_node
    if cluster.num_nodes == 1 and 2 * node <= cluster.device.node_size:
        larger = resized_cluster(cluster, 1, 2 * node)
    else:
        nodes = range(cluster.num_nodes + 1, 2 * cluster.num_nodes + 1)
        nodes = (num for num in nodes if recipe.train.global_batch % num == 0)
        larger = next((resized_cluster(cluster, num, node) for num in nodes), None)
    if larger is not None and not cluster.device.traits.shares_cores:
        yield Hint(templated("use {cluster}", cluster=larger), replace(question, cluster=larger))
    train = recipe.train
    if train.optimizer.states == "fp32" and not pins.engine_traits.keeps_states_elsewhere:
        small = train.model_copy(update={"optimizer": train.optimizer.model_copy(update={"states": "8bit"})})
        text = templated("set {field} to {value}", field="train.optimizer.states", value="8bit")
        yield Hint(text, _with(question, train=small))
    if "precision" not in pins.model_fields_set and "fp8" in cluster.device.peak_flops:
        fp8 = _with(question, plan=_pinned(pins, precision="fp8"))
        yield Hint(templated(INEXACT, field="plan.precision", value="fp8"), fp8)
    assert question.outline is not None
    if recipe.model.adapter:
        yield from adapter_changes(question)
    if recipe.data.seq_len >= 2048 and not question.outline.main.positions:
        half = recipe.data.model_copy(update={"seq_len": recipe.data.seq_len // 2})
        shorter = train.model_copy(update={"global_batch": 2 * train.global_batch})
        text = templated("halve sequences to {count}, with twice as many", count=f"{recipe.data.seq_len // 2:,}")
        yield Hint(text, _with(question, data=half, train=shorter))
    for tower in question.outline.towers[:-1]:
        if not tower.frozen and tower.layers > 2:
            frozen = replace(question, outline=with_frozen_tower(question.outline, tower.name))
            yield Hint(templated("freeze {tower}", tower=tower.name), frozen)


def with_frozen_tower(outline: Outline, name: str) -> Outline:
    """Return the model with that tower frozen."""
    towers = tuple(replace(each, frozen=True) if each.name == name else each for each in outline.towers)
    return replace(outline, towers=towers)


def fastest_like(question: Question, best: Plan) -> float | None:
    """Return the step seconds of the fastest plan with the mesh of `best`; None if none fits or can run."""
    mesh, pins = best.mesh, question.pins
    degrees = {axis: getattr(mesh, axis) for axis in ("tp", "pp", "cp", "ep")}
    fixed: dict[str, Any] = {"mesh": Mesh(**pins.mesh.model_dump(exclude_unset=True) | degrees)}
    if mesh.pp > 1:
        fixed["pipeline"] = best.pipeline
    if best.mesh.dp > 1 and "sharding" not in pins.model_fields_set:
        fixed["sharding"] = best.sharding
    return _fastest(_with(question, plan=_pinned(pins, **fixed)))


def _fastest(question: Question) -> float | None:
    """Return the step seconds of the fastest plan; None if none fits or can run."""
    space = Space(question)
    found = ranked_by_risk(space, PlanEvaluator(space)).plans
    return found[0].seconds if found else None


def _with(question: Question, **sections: object) -> Question:
    return replace(question, recipe=question.recipe.model_copy(update=sections))


def _pinned(pins: Plan, **fields: Any) -> Plan:
    pinned: dict[str, Any] = {name: getattr(pins, name) for name in pins.model_fields_set}
    return Plan(**pinned | fields)
