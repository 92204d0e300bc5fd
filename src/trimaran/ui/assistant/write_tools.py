"""The tools that change something; they are offered only by `trimaran mcp --write`."""

import signal
from typing import Annotated, Any

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations
from pydantic import BaseModel, Field

from trimaran.core import UserError
from trimaran.ui.assistant.read_tools import Run, Settings
from trimaran.ui.assistant.tool_limits import ToolLimits
from trimaran.ui.assistant.verb_call import VerbAnswer, VerbCaller
from trimaran.ui.web.start_run import StartedRun, start_run

WRITES = ToolAnnotations(read_only_hint=False, destructive_hint=False, open_world_hint=False)
CHANGE_SECONDS = 600


class StartedAnswer(BaseModel):
    """A run that was started or asked to stop."""

    run: str
    command: str


def add_write_tools(server: MCPServer[Any], limits: ToolLimits, caller: VerbCaller) -> None:
    """Add the tools that start, stop and change runs."""
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
        return await caller.call("replan", [limits.run(run), *limits.settings(settings)], seconds=CHANGE_SECONDS)

    @server.tool(annotations=WRITES)
    async def undo_decision(run: Run, number: Annotated[int, Field(ge=1)]) -> VerbAnswer:
        """Take back a change of the autopilot that was kept; the fields that it changed then stay as they were."""
        return await caller.call("decisions", [limits.run(run), "--undo", str(number)])
