"""Checks what an assistant names, and runs a command as a process of its own for its JSON answer.

A process per call keeps the server small, ends with a cancelled request, and answers what the command line answers.
"""

import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import anyio
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import BaseModel, Field

from trimaran.core import UserError
from trimaran.ui.web.runs_root import RunsRoot

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

    def require_write(self, what: str) -> None:
        if not self.may_write:
            raise ToolError(f"this server only reads, so it cannot {what}: start it with `trimaran mcp --write`")

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


@dataclass(frozen=True, slots=True)
class VerbCaller:
    """Calls commands in one folder, so that relative paths mean what they mean to the user there."""

    folder: Path

    async def call(self, verb: str, words: Sequence[str], *, stdin: bytes = b"", seconds: float = 120) -> VerbAnswer:
        """Return the answer of `trimaran VERB WORDS --json`. Raises ToolError with the command's own error."""
        command = [sys.executable, "-m", "trimaran", verb, *words, "--json"]
        try:
            with anyio.fail_after(seconds):
                done = await anyio.run_process(
                    command, input=stdin, check=False, cwd=self.folder, stderr=subprocess.PIPE
                )
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
            raise ToolError(error_text(answer["error"]))
        return VerbAnswer(command=shown, answer=answer)


def error_text(error: dict[str, Any]) -> str:
    return f"{error['code']}: {error['what']}\n  where: {error['where']}\n  fix:   {error['fix']}"
