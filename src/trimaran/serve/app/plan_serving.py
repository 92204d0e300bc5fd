"""`trimaran plan --serve`: how to serve a model on a cluster, and what it costs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trimaran.app import GREEN, ORANGE, add_model, facts_table, open_console, read_plan_request, say_reference
from trimaran.core import EXIT_DONE, UserError, did_you_mean, show_bytes, show_count, show_seconds
from trimaran.models import outline_for
from trimaran.serve.planning.serving import QUANTISED, WEIGHT_FORMATS, Traffic
from trimaran.serve.planning.serving_plans import (
    SERVING_GOALS,
    ServingAnswer,
    ServingPlan,
    ServingQuestion,
    accuracy_of,
    plan_serving,
)

Choice = TypeVar("Choice", bound=str)
SECONDS_PER_HOUR = 3600
MAX_TOKENS = 1 << 24  # of a prompt or an answer: more than any model takes
MAX_SHOWN_LOST = 8
MIN_SHOWN_MILLISECONDS = 10


def read_serving_question(what: str | None, options: Mapping[str, Any], settings: Sequence[str]) -> ServingQuestion:
    """Return the question for `what`, which `trimaran plan` would also accept. An adapter counts as merged."""
    request = read_plan_request(what, {"cluster": options["cluster"]}, settings)
    question = request.question
    section = question.recipe.model.model_copy(update={"adapter": None})
    outline = outline_for(section, question.recipe.data) if question.recipe.model.adapter else question.outline
    if outline is None:
        raise UserError("P096.nothing-known-model", where="MODEL|RECIPE")
    usual = Traffic()
    running = options["max_running"] or usual.max_sequences
    for name in ("prompt_tokens", "output_tokens"):
        value = options[name]
        if value is not None and not 1 <= value <= MAX_TOKENS:
            raise UserError(
                "A013.not-valid-number", where=f"--{name.replace('_', '-')}", value=value, max_tokens=MAX_TOKENS
            )
    asked = ServingQuestion(
        outline=outline,
        cluster=question.cluster,
        traffic=Traffic(
            prompt_tokens=options["prompt_tokens"] or usual.prompt_tokens,
            output_tokens=options["output_tokens"] or usual.output_tokens,
            max_sequences=running,
            # A step needs room for prompts beside the running sequences, as `trimaran serve` demands.
            max_step_tokens=max(usual.max_step_tokens, 2 * running),
        ),
        goal=_choice(options["goal"], SERVING_GOALS, "--goal"),
        tp=options["tp"],
        pp=options["pp"],
        weights=None if options["weights"] is None else _choice(options["weights"], WEIGHT_FORMATS, "--weights"),
    )
    say_reference(request)
    return asked


def serve_command(plan: ServingPlan) -> str:
    layout = plan.layout
    degrees = [f"--{name} {degree}" for name, degree in (("tp", layout.tp), ("pp", layout.pp)) if degree > 1]
    quantised = [f"--quantise {layout.weights}"] if layout.weights in QUANTISED else []
    return " ".join(["trimaran serve RUN_OR_FOLDER", *degrees, *quantised])


def caution(plan: ServingPlan) -> str:
    """Return a warning if our own engine does not run the plan; '' if it does."""
    if plan.layout.weights in QUANTISED and plan.layout.devices > 1:
        return "trimaran's own engine quantises weights on one device only: --engine vllm also does it over several"
    return ""


def _plan_as_dict(plan: ServingPlan) -> dict[str, Any]:
    memory = plan.memory
    return {
        **asdict(plan.layout),
        "replicas": plan.replicas,
        "memory": {**memory.terms, "cache": memory.num_pages * memory.page_bytes, "limit": memory.limit},
        "cache_bytes_per_token": memory.page_bytes // memory.page_size,
        "num_pages": memory.num_pages,
        "cache_tokens": memory.cache_tokens,
        "max_context": plan.max_context,
        "max_running": plan.most.running,
        "tokens_per_second": plan.tokens_per_second,
        "loads": [asdict(each) for each in plan.loads],
    }


def _choice(text: str, choices: Sequence[Choice], where: str) -> Choice:
    for each in choices:
        if each == text:
            return each
    raise UserError(
        "A013.no-use", where=where, text=text, guess=did_you_mean(text, choices), choices=", ".join(choices)
    )


def show_serving(answer: ServingAnswer, console: Console, *, cost: float | None) -> None:
    question, best = answer.question, answer.best
    traffic, facts = question.traffic, facts_table()
    layout = f"tp {best.layout.tp} x pp {best.layout.pp}, {best.layout.weights} weights"
    layout = f"{best.replicas} replicas of {layout}" if best.replicas > 1 else layout
    add_model(facts, question.outline)
    facts.add_row("cluster", str(question.cluster))
    facts.add_row("requests", f"prompts of {traffic.prompt_tokens:,} tokens, answers of {traffic.output_tokens:,}")
    facts.add_row("plan", Text(layout, style=f"bold {GREEN}"))
    memory = best.memory
    terms = ", ".join(f"{name} {show_bytes(size)}" for name, size in memory.terms.items())
    cache = show_bytes(memory.num_pages * memory.page_bytes)
    per_token = show_bytes(memory.page_bytes / memory.page_size)
    facts.add_row("memory", f"{terms}, cache {cache}: {show_bytes(memory.limit)} of a device")
    facts.add_row("cache", f"{memory.cache_tokens:,} tokens of {per_token} a device, in {memory.num_pages:,} pages")
    facts.add_row("longest", f"{best.max_context:,} tokens in one sequence")
    speed = f"{show_count(best.tokens_per_second)} tokens/s of all replicas, each with {best.most.running} requests"
    facts.add_row("speed", speed)
    if cost is not None:
        facts.add_row("price", f"{cost:,.2f} for a million generated tokens at that load")
    facts.add_row("error", accuracy_of(best, question.cluster))
    console.print(facts)
    console.print(
        Text("\none replica by load: time to the first token, between tokens, and in steps with a prompt", style="dim")
    )
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    columns = ("requests", "running", "first", "between", "with prompt", "tokens/s", "answers/s")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for load in best.loads:
        seconds = (load.first_token, load.between_tokens, load.slow_between_tokens)
        shown = [f"{1e3 * s:.1f} ms" if 1e3 * s < MIN_SHOWN_MILLISECONDS else show_seconds(s) for s in seconds]
        table.add_row(str(load.concurrent), str(load.running), *shown, show_count(load.tokens_per_second),
                      f"{load.requests_per_second:,.2f}")  # fmt: skip
    console.print(table)
    lost = [f"{layout}: {why}" for layout, why in answer.lost[:MAX_SHOWN_LOST]]
    parts = {"why": answer.reasons, "why others lost": lost, "what would change the answer": answer.hints}
    for title, lines in parts.items():
        if lines:
            console.print(Text(f"\n{title}", style="dim"))
        for line in lines:
            console.print(Text(f"- {line}"), soft_wrap=True)
    if warning := caution(best):
        console.print(Text.assemble(("\nwarning  ", ORANGE), warning), soft_wrap=True)
    console.print(Text(f"\nnext  {serve_command(best)}"), soft_wrap=True)


def plan_serving_command(
    what: str | None, asked: dict[str, Any], unused: Mapping[str, object], settings: list[str], *, as_json: bool
) -> int:
    if named := [name for name, value in unused.items() if value]:
        raise UserError("A013.plans-train-serve", where=named[0], first=named[0], options=" and ".join(named))
    answer, cost = plan_serving(read_serving_question(what, asked, settings)), None
    if asked["price"] is not None:  # of a million generated tokens, if every replica is fully loaded
        hourly = answer.question.cluster.world_size * asked["price"]
        cost = hourly / SECONDS_PER_HOUR / answer.best.tokens_per_second * 1e6
    if not as_json:
        show_serving(answer, open_console(), cost=cost)
        return EXIT_DONE
    question, best = answer.question, answer.best
    found = {
        "model": {"name": question.outline.name, "parameters": question.outline.num_parameters},
        "cluster": str(question.cluster),
        "goal": question.goal,
        "traffic": asdict(question.traffic),
        "best": _plan_as_dict(best),
        "ranked": [_plan_as_dict(plan) for plan in answer.ranked],
        "lost": [asdict(layout) | {"why": why} for layout, why in answer.lost],
        "reasons": list(answer.reasons),
        "hints": list(answer.hints),
        "price_per_million_tokens": cost,
        "accuracy": accuracy_of(best, question.cluster),
        "next": serve_command(best),
        "caution": caution(best) or None,
    }
    typer.echo(json.dumps(found))
    return EXIT_DONE
