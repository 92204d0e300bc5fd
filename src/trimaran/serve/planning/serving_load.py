"""Throughput and latency of an engine under load: how long a first token and each further one take."""

from dataclasses import dataclass

from trimaran.core import Seconds
from trimaran.machine import Cluster
from trimaran.models import Outline
from trimaran.serve.planning.serving import Layout, ServingMemory, Traffic
from trimaran.serve.planning.serving_time import StepWork, serving_step


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPoint:
    """What `concurrent` requests at a time get from one engine, if a new one arrives whenever one is finished.

    running: how many of them are decoded at once; the others wait for memory or for their turn.
    first_token: mean seconds from arrival to the first token.
    between_tokens: mean seconds between two tokens; `slow_between_tokens` in a step that also has a part of a prompt.
    tokens_per_second, requests_per_second: of all requests together; tokens are generated ones.
    """

    concurrent: int
    running: int
    first_token: Seconds
    between_tokens: Seconds
    slow_between_tokens: Seconds
    tokens_per_second: float
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
    return tuple(
        load_point(outline, layout, cluster, traffic, concurrent=each, most=most) for each in loads_to_show(most)
    )
