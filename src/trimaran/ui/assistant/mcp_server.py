"""The server of `trimaran mcp`: tools for a coding assistant over standard input and output.

Every tool checks what the assistant names, and runs a command as a process of its own for its JSON answer. A process
per call keeps the server small, ends with a cancelled request, and answers what the command line answers.
"""

import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import anyio
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations
from pydantic import BaseModel, Field

from trimaran.app import ACTIVE_STATUSES
from trimaran.core import VERSION, UserError
from trimaran.ui.assistant.docs_search import DocsIndex, docs_folder
from trimaran.ui.web.runs_root import RunsRoot, StartedRun, start_run

MAX_SETTINGS = 100
EXECUTES_CODE = "model.trust_remote_code"


class ToolLimits:
    """Checks the arguments of tools before a command sees them."""

    def __init__(self, folder: Path, runs: RunsRoot, *, may_write: bool) -> None:
        self.folder, self.runs, self.may_write = folder.resolve(), runs, may_write

    def run(self, name: str) -> str:
        """Return the path of the run `name`; raises ToolError if it is not the name of a run in the folder of runs."""
        try:
            return str(self.runs.open(name).path)
        except UserError as error:
            raise ToolError(str(error)) from None

    def source(self, name: str) -> str:
        """Return `name`, of a preset or of a file or folder below the folder of the server."""
        if not name or name.startswith("-"):
            raise ToolError(f"'{name[:60]}' is neither a preset nor a file")
        self._refuse_outside(name)
        return name

    def settings(self, settings: Sequence[str]) -> list[str]:
        """Return the words `--set FIELD=VALUE ...`; raises ToolError for a path outside, or if code would run."""
        if len(settings) > MAX_SETTINGS:
            raise ToolError(f"{len(settings)} settings are more than {MAX_SETTINGS}: write a recipe")
        for each in settings:
            field, separator, value = each.partition("=")
            if not separator:
                raise ToolError(f"'{each[:60]}' is not of the form FIELD=VALUE, such as plan.mesh.tp=2")
            if field.strip() == EXECUTES_CODE and not self.may_write:
                raise ToolError(f"{EXECUTES_CODE} executes code of a model: start the server with --write")
            self._refuse_outside(value)
        return [word for each in settings for word in ("--set", each)]

    def _refuse_outside(self, value: str) -> None:
        text = value.strip().strip("'\"")
        looks_like_path = text.startswith(("/", "~")) or ".." in Path(text).parts or (self.folder / text).is_symlink()
        if not looks_like_path:
            return
        if not (self.folder / Path(text).expanduser()).resolve().is_relative_to(self.folder):
            raise ToolError(f"{text[:120]} is outside of {self.folder}: start the server in a folder above it")


MAX_ANSWER_BYTES = 4 << 20
MAX_SHOWN_ERROR = 2000


class VerbAnswer(BaseModel):
    """The answer of a command, and the command itself, to repeat it in a terminal."""

    command: Annotated[str, Field(description="The command line that gives this answer, without --json.")]
    answer: Annotated[Any, Field(description="What the command prints with --json.")]


async def call_verb(
    folder: Path, verb: str, words: Sequence[str], *, stdin: bytes = b"", seconds: float = 120
) -> VerbAnswer:
    """Return the answer of `trimaran VERB WORDS --json`, called in `folder`: relative paths mean what they do there.

    Raises ToolError with the command's own error.
    """
    command = [sys.executable, "-m", "trimaran", verb, *words, "--json"]
    try:
        with anyio.fail_after(seconds):
            done = await anyio.run_process(command, input=stdin, check=False, cwd=folder, stderr=subprocess.PIPE)
    except TimeoutError:
        raise ToolError(f"`trimaran {verb}` took longer than {seconds:.0f} s and was ended") from None
    shown = shlex.join(["trimaran", verb, *words])
    if len(done.stdout) > MAX_ANSWER_BYTES:
        raise ToolError(f"the answer of `{shown}` has {len(done.stdout):,} bytes: ask for less")
    text = done.stdout.decode(errors="replace")
    try:
        lines = [json.loads(line) for line in text.splitlines() if line.strip()]
    except json.JSONDecodeError:
        lines = []
    if not lines:
        reason = done.stderr.decode(errors="replace").strip()[-MAX_SHOWN_ERROR:] or f"exit code {done.returncode}"
        raise ToolError(f"`{shown}` failed: {reason}")
    answer = lines[0] if len(lines) == 1 else lines
    if isinstance(answer, dict) and set(answer) == {"error"}:
        error = answer["error"]
        raise ToolError(f"{error['code']}: {error['what']}\n  where: {error['where']}\n  fix:   {error['fix']}")
    return VerbAnswer(command=shown, answer=answer)


CallVerb = Callable[..., Awaitable[VerbAnswer]]
READS = ToolAnnotations(read_only_hint=True, open_world_hint=False)
LONG_FIELDS = ("misses", "ties", "pareto")  # of a plan: nine tenths of its text
REHEARSAL_SECONDS = 1800

Model = Annotated[str, Field(description="A preset such as llama-3.1-8b, a recipe (YAML), a config.json or a model "
                                         "folder; paths are relative to the folder of the server.")]  # fmt: skip
ClusterName = Annotated[str | None, Field(description="8xH100, 4x8xA100-80GB, 2xcpu, auto or a YAML file.")]
SeqLen = Annotated[int | None, Field(ge=1, description="Tokens per sequence.")]
GlobalBatch = Annotated[int | None, Field(ge=1, description="Sequences per optimizer step.")]
Settings = Annotated[list[str], Field(description="Fields of the recipe, as FIELD=VALUE: plan.mesh.tp=2, "
                                                  "plan.precision=bf16, model.adapter.rank=16.")]  # fmt: skip
Run = Annotated[str, Field(description="The name of a run; list_runs has them.")]
Goal = Literal["throughput", "memory", "cost", "fewest-gpus", "goodput"]


class DocsHit(BaseModel):
    """A section of the documentation."""

    page: Annotated[str, Field(description="For read_docs.")]
    heading: str
    text: str


class DocsHits(BaseModel):
    """The sections that match, best first."""

    sections: list[DocsHit]


class DocsPage(BaseModel):
    """A page of the documentation, in Markdown."""

    page: str
    text: str


class ListedRuns(BaseModel):
    """Runs, newest first; `total` counts all that match."""

    runs: list[dict[str, Any]]
    total: int


def add_planning_tools(server: MCPServer[Any], limits: ToolLimits, call: CallVerb) -> None:
    @server.tool(annotations=READS)
    async def plan(
        model: Model,
        cluster: ClusterName = None,
        seq_len: SeqLen = None,
        global_batch: GlobalBatch = None,
        goal: Goal = "throughput",
        settings: Settings = [],  # noqa: B006 - a schema's default; never changed
        top: Annotated[int, Field(ge=1, le=50, description="How many plans to return.")] = 3,
        detail: Annotated[bool, Field(description="Also the plans that tied, and why others lost.")] = False,
    ) -> VerbAnswer:
        """Find the fastest parallel plan for a model on a cluster: degrees, memory and step time by term.

        Needs no GPU. The answer says whether it fits, and its `next` is the command that trains it.
        """
        words = [limits.source(model), "--goal", goal, "--top", str(top), *limits.settings(settings)]
        words += _options({"--cluster": cluster, "--seq-len": seq_len, "--global-batch": global_batch}, limits)
        found = await call("plan", words)
        if not detail and isinstance(found.answer, dict):
            found.answer = {name: each for name, each in found.answer.items() if name not in LONG_FIELDS}
        return found

    @server.tool(annotations=READS)
    async def predict(
        questions: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=10_000, description=(
            'Such as {"id": 1, "model": "llama-3.1-8b", "cluster": "8xH100", "plan": {"mesh": {"tp": 2}, "sharding": '
            '"parameters", "recompute": "selective", "micro_batch": 1, "global_batch": 64}, "stack": "megatron"}. A '
            "model can also be {layers, hidden, heads, kv_heads, ffn, vocab, seq_len, experts, top_k}."
        ))],
    ) -> VerbAnswer:  # fmt: skip
        """Predict memory and speed of given plans, also of other software (`stack`: megatron, torchtitan, ...)."""
        lines = "".join(json.dumps(each) + "\n" for each in questions)
        found = await call("predict", ["-"], stdin=lines.encode())
        answers = found.answer if isinstance(found.answer, list) else [found.answer]
        return VerbAnswer(command="trimaran predict plans.jsonl", answer=answers)

    @server.tool(annotations=ToolAnnotations(read_only_hint=False, destructive_hint=False, open_world_hint=False))
    async def rehearse(
        model: Model,
        cluster: ClusterName = None,
        settings: Settings = [],  # noqa: B006
        ranks: Annotated[str | None, Field(description="first, last, stages, or numbers with commas.")] = None,
        layers: Annotated[int, Field(ge=0, le=4096, description="Run this many layers; 0 is all.")] = 0,
    ) -> VerbAnswer:
        """Run single ranks of a plan for real on this machine's device, and measure memory and compute time.

        It uses the device for minutes. It is refused while a run is active, unless the server may write.
        """
        active = limits.runs.list(statuses=ACTIVE_STATUSES, count=1).runs
        if active and not limits.may_write:
            raise ToolError(f"this server only reads, so it cannot rehearse while the run {active[0].slug} is active, "
                            "which it could disturb: start it with `trimaran mcp --write`")  # fmt: skip
        words = [limits.source(model), *limits.settings(settings), "--layers", str(layers)]
        words += _options({"--cluster": cluster, "--ranks": ranks}, limits)
        return await call("rehearse", words, seconds=REHEARSAL_SECONDS)


def add_run_tools(server: MCPServer[Any], limits: ToolLimits, call: CallVerb) -> None:
    @server.tool(annotations=READS)
    async def list_runs(
        search: Annotated[str, Field(description="Words that the name contains.")] = "",
        first: Annotated[int, Field(ge=0)] = 0,
        count: Annotated[int, Field(ge=1, le=200)] = 20,
    ) -> ListedRuns:
        """List the runs of the folder of runs, newest first: status, model, plan, step, loss, tokens per second."""
        page = limits.runs.list(search=search, first=first, count=count)
        fields = ("slug", "status", "model", "plan", "cluster", "step", "total_steps", "loss", "tokens_per_second")
        return ListedRuns(runs=[{name: getattr(row, name) for name in fields} for row in page.runs], total=page.total)

    @server.tool(annotations=READS)
    async def run_status(run: Run) -> VerbAnswer:
        """Show how a run stands: status, steps, speed, memory, findings of the doctor."""
        return await call("watch", [limits.run(run)])

    @server.tool(annotations=READS)
    async def doctor(
        run: Annotated[str, Field(description="The name of a run; empty checks this machine.")] = "",
        against: Annotated[str, Field(description="A run of the same recipe on fewer ranks, to compare.")] = "",
    ) -> VerbAnswer:
        """Say what is wrong with a run or with this machine. Each finding has evidence and the change that fixes it."""
        if not run:
            return await call("doctor", ["--quick"])
        return await call("doctor", [limits.run(run), *_options({"--against": against and limits.run(against)})])

    @server.tool(annotations=READS)
    async def incidents(run: Run) -> VerbAnswer:
        """Show what went wrong in a run: crashes, hangs, NaN, preemption; the rank at fault, the action, the cost."""
        return await call("incidents", [limits.run(run)])

    @server.tool(annotations=READS)
    async def decisions(run: Run) -> VerbAnswer:
        """Show what the autopilot of a run changed, what it expected and measured, and what it kept."""
        return await call("decisions", [limits.run(run)])

    @server.tool(annotations=READS)
    async def history(
        model: Annotated[str | None, Field(description="Only models whose name contains this.")] = None,
        cluster: Annotated[str | None, Field(description="Only clusters whose name contains this.")] = None,
    ) -> VerbAnswer:
        """List the plans that the runs measured, by model and cluster, fastest first, beside their predictions."""
        words = [str(limits.runs.path)] if limits.runs.path.is_dir() else []
        return await call("history", [*words, *_options({"--model": model, "--cluster": cluster})])


def add_docs_tools(server: MCPServer[Any], index: DocsIndex) -> None:
    @server.tool(annotations=READS)
    async def search_docs(
        query: Annotated[str, Field(min_length=1, max_length=500, description="Words, a field or an error code.")],
        count: Annotated[int, Field(ge=1, le=20)] = 5,
    ) -> DocsHits:
        """Search Trimaran's documentation: guides, error codes (such as M010), fields of recipes, decisions."""
        return DocsHits(sections=[DocsHit(**each._asdict()) for each in index.search(query, count)])

    @server.tool(annotations=READS)
    async def read_docs(page: Annotated[str, Field(description="Such as guides/planning.md.")]) -> DocsPage:
        """Return a page of the documentation."""
        if (text := index.page(page)) is None:
            raise ToolError(f"there is no page {page[:80]}: search_docs names pages")
        return DocsPage(page=page, text=text)


def _options(options: dict[str, Any], limits: ToolLimits | None = None) -> list[str]:
    words: list[str] = []
    for name, value in options.items():
        if value is not None and value != "":
            words += [name, limits.source(value) if limits and isinstance(value, str) else str(value)]
    return words


WRITES = ToolAnnotations(read_only_hint=False, destructive_hint=False, open_world_hint=False)
CHANGE_SECONDS = 600


class StartedAnswer(BaseModel):
    """A run that was started or asked to stop."""

    run: str
    command: str


def add_write_tools(server: MCPServer[Any], limits: ToolLimits, call: CallVerb) -> None:
    started: dict[str, StartedRun] = {}

    @server.tool(annotations=WRITES)
    async def train(
        recipe: Annotated[str, Field(max_length=100_000, description="The text of a recipe, YAML.")],
        name: Annotated[str, Field(description="The name of the run; a number is added if it is taken.")],
    ) -> StartedAnswer:
        """Start a run on this machine. It goes on if the server ends. run_status shows it."""
        try:
            run = start_run(limits.runs, recipe, name, may_write=limits.may_write)
        except UserError as error:
            raise ToolError(str(error)) from None
        started[run.slug] = run
        return StartedAnswer(run=run.slug, command=f"trimaran train {run.recipe} --run-dir {run.path}")

    @server.tool(annotations=WRITES)
    async def stop(run: Run) -> StartedAnswer:
        """Stop a run that `train` started: it writes a checkpoint first. `trimaran resume` continues it."""
        if (found := started.get(run)) is None:
            raise ToolError(f"'{run[:60]}' was not started here; this stops: {', '.join(started) or 'none'}")
        if found.process.poll() is None:
            found.process.send_signal(signal.SIGINT)
        return StartedAnswer(run=run, command=f"trimaran resume {found.path}")

    @server.tool(annotations=WRITES)
    async def replan(run: Run, settings: Settings = []) -> VerbAnswer:  # noqa: B006 - a schema's default
        """Change the plan of a running run without a stop; if the new plan fails, the ranks go on with the old one."""
        return await call("replan", [limits.run(run), *limits.settings(settings)], seconds=CHANGE_SECONDS)

    @server.tool(annotations=WRITES)
    async def undo_decision(run: Run, number: Annotated[int, Field(ge=1)]) -> VerbAnswer:
        """Take back a change of the autopilot that was kept; the fields that it changed then stay as they were."""
        return await call("decisions", [limits.run(run), "--undo", str(number)])


INSTRUCTIONS = """\
Trimaran plans, trains and diagnoses distributed training of PyTorch models.
Before a run: plan (what fits, how fast), predict (given plans), rehearse (measure ranks of a plan on this device).
For a run: list_runs, run_status, doctor (findings with fixes), incidents, decisions, history.
Every answer has the command that gives it; show it to the user. search_docs explains fields and error codes."""


def build_server(folder: Path, runs: RunsRoot, *, may_write: bool) -> MCPServer[Any]:
    """Return the server. Commands run in `folder`; runs are those of `runs`."""
    server: MCPServer[Any] = MCPServer("trimaran", version=VERSION, instructions=INSTRUCTIONS, log_level="WARNING")
    limits, call = ToolLimits(folder, runs, may_write=may_write), partial(call_verb, folder)
    add_planning_tools(server, limits, call)
    add_run_tools(server, limits, call)
    if (docs := docs_folder()) is not None:
        add_docs_tools(server, DocsIndex.of_folder(docs))
    if may_write:
        add_write_tools(server, limits, call)
    return server
