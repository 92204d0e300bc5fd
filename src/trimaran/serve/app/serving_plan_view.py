"""Prints the answer of `plan --serve`: the layout, what fits in memory, and latency and throughput by load."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trimaran.app.plan.plan_view import add_model, facts_table
from trimaran.app.show.text_chart import GREEN, ORANGE
from trimaran.core import show_bytes, show_count, show_seconds
from trimaran.serve.app.serving_request import caution, price_per_million, serve_command
from trimaran.serve.planning.serving_plans import ServingAnswer, ServingPlan, accuracy_of

MAX_SHOWN_LOST = 8
MIN_SHOWN_MILLISECONDS = 10


def show_serving(answer: ServingAnswer, console: Console, *, price: float | None) -> None:
    """Print the answer."""
    question, best = answer.question, answer.best
    traffic, facts = question.traffic, facts_table()
    add_model(facts, question.outline)
    facts.add_row("cluster", str(question.cluster))
    facts.add_row("requests", f"prompts of {traffic.prompt_tokens:,} tokens, answers of {traffic.output_tokens:,}")
    facts.add_row("plan", Text(_plan_text(best), style=f"bold {GREEN}"))
    _add_memory(facts, best)
    speed = f"{show_count(best.tokens_per_second)} tokens/s of all replicas, each with {best.most.running} requests"
    facts.add_row("speed", speed)
    if price is not None:
        cost = price_per_million(best, question.cluster.world_size, price)
        facts.add_row("price", f"{cost:,.2f} for a million generated tokens at that load")
    facts.add_row("error", accuracy_of(best, question.cluster))
    console.print(facts)
    console.print(
        Text("\none replica by load: time to the first token, between tokens, and in steps with a prompt", style="dim")
    )
    console.print(_load_table(best))
    _show_lines(console, "why", answer.reasons)
    lost = [f"{layout}: {why}" for layout, why in answer.lost]
    _show_lines(console, "why others lost", lost[:MAX_SHOWN_LOST])
    _show_lines(console, "what would change the answer", answer.hints)
    if warning := caution(best):
        console.print(Text.assemble(("\nwarning  ", ORANGE), warning), soft_wrap=True)
    console.print(Text(f"\nnext  {serve_command(best)}"), soft_wrap=True)


def _plan_text(plan: ServingPlan) -> str:
    replicas = f"{plan.replicas} replicas of " if plan.replicas > 1 else ""
    return f"{replicas}tp {plan.layout.tp} x pp {plan.layout.pp}, {plan.layout.weights} weights"


def _add_memory(facts: Table, plan: ServingPlan) -> None:
    memory = plan.memory
    terms = ", ".join(f"{name} {show_bytes(size)}" for name, size in memory.terms.items())
    cache = show_bytes(memory.num_pages * memory.page_bytes)
    facts.add_row("memory", f"{terms}, cache {cache}: {show_bytes(memory.limit)} of a device")
    per_token = show_bytes(memory.page_bytes / memory.page_size)
    facts.add_row("cache", f"{memory.cache_tokens:,} tokens of {per_token} a device, in {memory.num_pages:,} pages")
    facts.add_row("longest", f"{plan.max_context:,} tokens in one sequence")


def _load_table(plan: ServingPlan) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    columns = ("requests", "running", "first", "between", "with prompt", "tokens/s", "answers/s")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for load in plan.loads:
        seconds = (load.first_token, load.between_tokens, load.slow_between_tokens)
        table.add_row(str(load.concurrent), str(load.running), *(_show_latency(each) for each in seconds),
                      show_count(load.tokens_per_second), f"{load.requests_per_second:,.2f}")  # fmt: skip
    return table


def _show_latency(seconds: float) -> str:
    milliseconds = 1e3 * seconds
    return f"{milliseconds:.1f} ms" if milliseconds < MIN_SHOWN_MILLISECONDS else show_seconds(seconds)


def _show_lines(console: Console, title: str, lines: tuple[str, ...] | list[str]) -> None:
    if lines:
        console.print(Text(f"\n{title}", style="dim"))
    for line in lines:
        console.print(Text(f"- {line}"), soft_wrap=True)
