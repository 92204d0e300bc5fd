"""Chooses how to serve a model: degrees and the format of the weights, the load that it takes, and why others lost."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

from trimaran.core import Bytes, Seconds, UserError, show_bytes, show_count, show_seconds, templated
from trimaran.machine import Cluster, refuse_mixed
from trimaran.models import Outline, OutlineLayer
from trimaran.serve.planning.serving import (
    QUANTISED,
    WEIGHT_FORMATS,
    Layout,
    ServingMemory,
    StepWork,
    Traffic,
    WeightFormat,
    serving_memory,
    serving_step,
)

ServingGoal = Literal["throughput", "latency", "fewest-gpus"]
SERVING_GOALS: tuple[ServingGoal, ...] = get_args(ServingGoal)
TIE_RATIO = 1.05  # plans within this factor of the best are ties; the one with fewer devices per engine is taken
MEASURED_DEVICE = "H200"
MAX_SMALLEST = 1 << 12  # devices of the largest cluster that is tried when nothing fits
FEWER_BITS: dict[str, tuple[WeightFormat, ...]] = {"cuda": ("fp8", "int8", "int4"), "cpu": ("int8",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPoint:
    """What `concurrent` requests at a time get from one engine, if a new one arrives whenever one is finished."""

    concurrent: int
    running: int  # that are decoded at once; the others wait for memory or for their turn
    first_token: Seconds  # mean, from the arrival
    between_tokens: Seconds  # mean
    slow_between_tokens: Seconds  # in a step that also has a part of a prompt
    tokens_per_second: float  # generated, of all requests together
    requests_per_second: float


def max_running(memory: ServingMemory, traffic: Traffic) -> int:
    """Return how many complete sequences run at once: limited by pages, by the engine, and by the tokens of a step.

    Each running sequence needs one token of a step for itself, and on average as many for prompts as its own prompt
    has for each token that it generates.
    """
    by_pages = max(0, memory.num_pages) // traffic.pages
    by_step = int(traffic.max_step_tokens * traffic.output_tokens / traffic.length)
    return min(by_pages, traffic.max_sequences, max(1, by_step))


def load_point(
    outline: Outline, layout: Layout, cluster: Cluster, traffic: Traffic, *, concurrent: int, most: int
) -> LoadPoint:
    """Return what `concurrent` requests get if at most `most` run at once. Prompts are computed in chunks.

    In a steady state each running sequence is replaced by a new prompt after its last token, so a step has
    running x prompt / output tokens of prompts on average. Fewer than a whole chunk are not spread over all steps:
    some steps have a chunk and the others have none.
    """
    running = min(concurrent, most)
    prompt, output = traffic.prompt_tokens, traffic.output_tokens
    room = max(1, traffic.max_step_tokens - running)
    mean = running * prompt / output
    chunk = max(1, round(min(room, max(mean, min(prompt, room)))))
    fraction = min(1.0, mean / chunk)
    context = prompt + output // 2

    def seconds(prefill: int) -> float:
        work = StepWork(decoded=running, context=context, prefill=prefill, prompt=prompt)
        return sum(serving_step(outline, layout, cluster, work).values())

    slow = seconds(chunk)
    between = (1 - fraction) * seconds(0) + fraction * slow
    finished = running / (output * between)  # requests a second
    waiting = (concurrent - running) / finished
    own = -(-prompt // chunk) * slow
    return LoadPoint(
        concurrent=concurrent,
        running=running,
        first_token=Seconds(waiting + between / 2 + own),
        between_tokens=Seconds(between),
        slow_between_tokens=Seconds(slow),
        tokens_per_second=running / between,
        requests_per_second=finished,
    )


def loads_to_show(most: int) -> tuple[int, ...]:
    """Return numbers of concurrent requests: powers of two up to the most that run, that number, and twice as many."""
    powers = [1 << power for power in range(most.bit_length()) if 1 << power < most]
    return (*powers, most, 2 * most)


def load_table(
    outline: Outline, layout: Layout, cluster: Cluster, traffic: Traffic, memory: ServingMemory
) -> tuple[LoadPoint, ...]:
    """Return the points of `loads_to_show`, in order; empty if not one sequence fits."""
    most = max_running(memory, traffic)
    if most < 1:
        return ()
    loads = loads_to_show(most)
    return tuple(load_point(outline, layout, cluster, traffic, concurrent=each, most=most) for each in loads)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingQuestion:
    """A model, a cluster and its requests. What is pinned is not None."""

    outline: Outline
    cluster: Cluster
    traffic: Traffic
    goal: ServingGoal = "throughput"
    tp: int | None = None
    pp: int | None = None
    weights: WeightFormat | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPlan:
    """One layout on the cluster: `replicas` engines, the memory of a device, and one engine under load."""

    layout: Layout
    replicas: int
    memory: ServingMemory
    loads: tuple[LoadPoint, ...]
    max_context: int

    @property
    def fits(self) -> bool:
        return bool(self.loads)

    @property
    def most(self) -> LoadPoint:
        """The largest load at which no request waits."""
        return self.loads[-2]

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens of all replicas, each with as many requests as it runs at once."""
        return self.replicas * self.most.tokens_per_second


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingAnswer:
    """The best plan first, then the others that fit; `lost` says why each other one is not the first."""

    question: ServingQuestion
    ranked: tuple[ServingPlan, ...]
    lost: tuple[tuple[Layout, str], ...]
    reasons: tuple[str, ...]
    hints: tuple[str, ...]

    @property
    def best(self) -> ServingPlan:
        return self.ranked[0]


def accuracy_of(plan: ServingPlan, cluster: Cluster) -> str:
    if cluster.device.name == MEASURED_DEVICE and plan.layout == Layout():
        return "within 12 % of steps with 64 requests of 1B and 8B models on one H200; other loads are not measured"
    return "times are not measured here: only bf16 on one H200 was; compare with a benchmark before you rely on them"


def plan_serving(question: ServingQuestion) -> ServingAnswer:
    """Return the best way to serve the model. Raises UserError if it is no language model, or if nothing fits.

    Weights keep 16 bits (fp32 on a CPU) unless nothing fits so, or a format is pinned.
    """
    outline, traffic = question.outline, question.traffic
    refuse_mixed(question.cluster, "plan --serve")
    layers = [block for block, _ in outline.main.runs]
    if not outline.main.outputs or not outline.main.vocab or not all(
        isinstance(each, OutlineLayer) and each.causal for each in layers
    ):  # fmt: skip
        raise UserError("P096.not-generate-text", where="MODEL|RECIPE", outline=outline.name)
    if outline.max_seq_len and traffic.length > outline.max_seq_len:
        raise UserError(
            "P096.prompt-answer-tokens",
            where="--prompt-tokens",
            prompt_tokens=traffic.prompt_tokens,
            output_tokens=traffic.output_tokens,
            max_seq_len=outline.max_seq_len,
            outline=outline.name,
        )
    tried: list[ServingPlan] = []
    for weights in _formats(question):
        plans = [_serving_plan(question, layout) for layout in _layouts(question, weights)]
        tried += plans
        if fitting := [plan for plan in plans if plan.fits]:
            ranked = _ranked(fitting, question.goal)
            best = ranked[0]
            lost = [(plan.layout, _why_slower(plan, best, question.goal)) for plan in ranked[1:]]
            for plan in (each for each in tried if not each.fits):
                memory = plan.memory
                over = f"{show_bytes(memory.missing)} over the {show_bytes(memory.limit)} of a device"
                few = f"its cache has {memory.cache_tokens:,} tokens, less than one sequence"
                lost.append((plan.layout, f"does not fit: {over if memory.num_pages < 1 else few}"))
            return ServingAnswer(
                question=question,
                ranked=tuple(ranked),
                lost=tuple(lost),
                reasons=tuple(_reasons(question, best, tried)),
                hints=tuple(_hints(question, best)),
            )
    raise _no_fit(question, tried)


def tensor_degrees(outline: Outline, most: int) -> tuple[int, ...]:
    """Return the tensor-parallel degrees that divide the heads and widths of every layer, up to `most`."""
    sizes: set[int] = set()
    for block, _ in outline.main.runs:
        if isinstance(block, OutlineLayer):
            experts = block.experts
            sizes |= {block.heads, block.kv_heads, block.ffn if experts is None else experts.ffn}
            sizes |= {experts.shared_ffn} if experts and experts.shared_ffn else set()
    common = math.gcd(*sizes)
    return tuple(degree for degree in range(1, most + 1) if common % degree == 0)


def _formats(question: ServingQuestion) -> Iterator[WeightFormat]:
    device = question.cluster.device
    weights = question.weights
    if weights is not None:
        has_no_units = weights in ("fp8", "bf16") and weights not in device.peak_flops
        if has_no_units and device.traits.has_data_sheet:
            usable = [each for each in WEIGHT_FORMATS if each not in ("fp8", "bf16") or each in device.peak_flops]
            raise UserError(
                "P096.no-arithmetic", where="--weights", device=device.name, weights=weights, usable=", ".join(usable)
            )
        yield weights
        return
    half = "bf16" if "bf16" in device.peak_flops else "fp16"
    yield half if device.traits.prefers_16_bits else "fp32"
    yield from (each for each in FEWER_BITS[device.kind] if each != "fp8" or "fp8" in device.peak_flops)


def _layouts(question: ServingQuestion, weights: WeightFormat) -> Iterator[Layout]:
    """Yield the layouts of one engine: tensor parallelism inside a node, and stages of at least one layer."""
    cluster, outline = question.cluster, question.outline
    degrees = tensor_degrees(outline, cluster.devices_per_node)
    if question.tp is not None and question.tp not in degrees:
        raise UserError(
            "P096.tp-cannot-split",
            where="--tp",
            tp=question.tp,
            outline=outline.name,
            cluster=cluster,
            degrees=", ".join(map(str, degrees)),
        )
    most = min(outline.main.layers, cluster.world_size)
    if question.pp is not None and not 1 <= question.pp <= most:
        raise UserError(
            "P096.pp-cannot-split", where="--pp", pp=question.pp, outline=outline.name, cluster=cluster, most=most
        )
    for tp in degrees if question.tp is None else (question.tp,):
        for pp in range(1, most + 1) if question.pp is None else (question.pp,):
            if tp * pp <= cluster.world_size and cluster.devices_per_node % tp == 0:
                yield Layout(tp=tp, pp=pp, weights=weights)


def _serving_plan(question: ServingQuestion, layout: Layout) -> ServingPlan:
    cluster, traffic = question.cluster, question.traffic
    memory = serving_memory(question.outline, layout, cluster.device, traffic)
    loads = load_table(question.outline, layout, cluster, traffic, memory)
    longest = question.outline.max_seq_len or memory.cache_tokens
    return ServingPlan(
        layout=layout,
        replicas=cluster.world_size // layout.devices,
        memory=memory,
        loads=loads,
        max_context=min(memory.cache_tokens, longest),
    )


def _ranked(plans: list[ServingPlan], goal: ServingGoal) -> list[ServingPlan]:
    """Return the plans, the best first. Of those that tie with it, the one with the fewest devices is the best."""
    score: dict[str, Callable[[ServingPlan], float]] = {
        "throughput": lambda plan: -plan.tokens_per_second,
        "latency": lambda plan: plan.loads[0].between_tokens,
        "fewest-gpus": lambda plan: plan.layout.devices,
    }
    order = sorted(plans, key=lambda plan: (score[goal](plan), -plan.tokens_per_second, plan.layout.devices))
    best = score[goal](order[0])
    # Within TIE_RATIO of the best; where more is better, scores are negative.
    limit = best / TIE_RATIO if best < 0 else best * TIE_RATIO
    ties = [plan for plan in order if score[goal](plan) <= limit] if goal != "fewest-gpus" else order[:1]
    first = min(ties, key=lambda plan: (plan.layout.devices, plan.layout.pp))
    return [first, *(plan for plan in order if plan is not first)]


def _reasons(question: ServingQuestion, best: ServingPlan, tried: list[ServingPlan]) -> Iterator[str]:
    what = {"throughput": "generates the most tokens a second", "latency": "has the least time between tokens",
            "fewest-gpus": "needs the fewest devices"}[question.goal]  # fmt: skip
    ending = "; of those within 5 % of the best, it has the fewest devices" if question.goal != "fewest-gpus" else ""
    yield f"of what fits, tp {best.layout.tp} x pp {best.layout.pp} {what}{ending}"
    formats = list(dict.fromkeys(plan.layout.weights for plan in tried))
    if question.weights is None and len(formats) > 1:
        yield f"weights are {best.layout.weights}: {' and '.join(formats[:-1])} fit nowhere on {question.cluster}"
    elif question.weights is None:
        yield f"weights are {best.layout.weights}: they fit, so nothing is quantised"


def _why_slower(plan: ServingPlan, best: ServingPlan, goal: ServingGoal) -> str:
    if goal == "latency":
        own, chosen = plan.loads[0].between_tokens, best.loads[0].between_tokens
        return f"{show_seconds(own)} between tokens, not {show_seconds(chosen)}"
    if goal == "fewest-gpus" and plan.layout.devices > best.layout.devices:
        return f"{plan.layout.devices} devices, not {best.layout.devices}"
    return f"{plan.tokens_per_second / best.tokens_per_second:.2f} times the tokens a second"


def _hints(question: ServingQuestion, best: ServingPlan) -> Iterator[str]:
    """Yield what weights of fewer bits would change, if they are not needed. Our engine has them on one device only."""
    if question.weights is not None or best.layout.weights in QUANTISED or best.layout.devices > 1:
        return
    formats = list(_formats(question))
    for weights in formats[formats.index(best.layout.weights) + 1 :]:
        plan = _serving_plan(question, replace(best.layout, weights=weights))
        now, then = best.loads[0].between_tokens, plan.loads[0].between_tokens
        yield (
            f"--weights {weights}: {show_count(plan.memory.cache_tokens)} tokens of cache instead of "
            f"{show_count(best.memory.cache_tokens)}, one request {now / then:.1f} times as fast; "
            "answers change slightly"
        )


def _no_fit(question: ServingQuestion, tried: list[ServingPlan]) -> UserError:
    nearest = min(tried, key=lambda plan: (plan.memory.missing, -plan.memory.num_pages))
    memory, cluster, traffic = nearest.memory, question.cluster, question.traffic
    if memory.num_pages < 1:
        what = (
            f"{show_bytes(memory.missing)} too big for the {show_bytes(memory.limit)} that an engine uses of "
            f"{cluster.device.name}, of which weights take {show_bytes(Bytes(memory.terms['weights']))}"
        )
    else:
        what = f"its cache holds {memory.cache_tokens:,} tokens, and one sequence has {traffic.length:,}"
    fix, size, weights = "use a device with more memory", cluster.world_size, nearest.layout.weights
    while (size := 2 * size) <= MAX_SMALLEST:  # the smallest larger cluster of the same devices that is enough
        inside = min(size, max(cluster.devices_per_node, cluster.device.node_size))
        if size % inside:
            continue
        larger = replace(cluster, devices_per_node=inside, num_nodes=size // inside, links=())
        layouts = _layouts(replace(question, cluster=larger, weights=weights), weights)
        memories = (serving_memory(question.outline, layout, larger.device, traffic) for layout in layouts)
        if any(each.num_pages >= traffic.pages for each in memories):
            fix = templated("use {larger}", larger=larger)
            break
    return UserError(
        "P097.cannot-served-smallest",
        where="--cluster",
        outline=question.outline.name,
        cluster=cluster,
        layout=nearest.layout,
        text=what,
        way=fix,
    )
