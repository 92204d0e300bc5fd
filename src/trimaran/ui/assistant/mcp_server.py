"""The server of `trimaran mcp`: tools for a coding assistant over standard input and output."""

from pathlib import Path
from typing import Any

from mcp.server import MCPServer

from trimaran.core.version import VERSION
from trimaran.ui.assistant.docs_search import DocsIndex, docs_folder
from trimaran.ui.assistant.read_tools import (
    add_diagnosis_tools,
    add_docs_tools,
    add_plan_tool,
    add_predict_tool,
    add_rehearse_tool,
    add_run_tools,
)
from trimaran.ui.assistant.tool_limits import ToolLimits
from trimaran.ui.assistant.verb_call import VerbCaller
from trimaran.ui.assistant.write_tools import add_write_tools
from trimaran.ui.web.runs_root import RunsRoot

INSTRUCTIONS = """\
Trimaran plans, trains and diagnoses distributed training of PyTorch models.
Before a run: plan (what fits, how fast), predict (given plans), rehearse (measure ranks of a plan on this device).
For a run: list_runs, run_status, doctor (findings with fixes), incidents, decisions, history.
Every answer has the command that gives it; show it to the user. search_docs explains fields and error codes."""


def build_server(folder: Path, runs: RunsRoot, *, may_write: bool) -> MCPServer[Any]:
    """Return the server. Commands run in `folder`; runs are those of `runs`."""
    server: MCPServer[Any] = MCPServer("trimaran", version=VERSION, instructions=INSTRUCTIONS, log_level="WARNING")
    limits, caller = ToolLimits(folder, runs, may_write=may_write), VerbCaller(folder)
    add_predict_tool(server, caller)
    for add_tools in (add_plan_tool, add_rehearse_tool, add_run_tools, add_diagnosis_tools):
        add_tools(server, limits, caller)
    if (docs := docs_folder()) is not None:
        add_docs_tools(server, DocsIndex.of_folder(docs))
    if may_write:
        add_write_tools(server, limits, caller)
    return server
