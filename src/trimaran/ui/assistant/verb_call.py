"""Runs a command of Trimaran as a process of its own and returns its JSON answer.

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
        return VerbAnswer(command=shown, answer=_answer(done.stdout, done.stderr, done.returncode, shown))


def _answer(stdout: bytes, stderr: bytes, code: int, shown: str) -> Any:
    if len(stdout) > MAX_ANSWER_BYTES:
        raise ToolError(f"the answer of `{shown}` has {len(stdout):,} bytes: ask for less")
    text = stdout.decode(errors="replace")
    try:
        lines = [json.loads(line) for line in text.splitlines() if line.strip()]
    except json.JSONDecodeError:
        lines = []
    if not lines:
        reason = stderr.decode(errors="replace").strip()[-MAX_SHOWN_ERROR:] or f"exit code {code}"
        raise ToolError(f"`{shown}` failed: {reason}")
    answer = lines[0] if len(lines) == 1 else lines
    if isinstance(answer, dict) and set(answer) == {"error"}:
        raise ToolError(error_text(answer["error"]))
    return answer


def error_text(error: dict[str, Any]) -> str:
    """Return a user's mistake in the three lines that the command line shows."""
    return f"{error['code']}: {error['what']}\n  where: {error['where']}\n  fix:   {error['fix']}"
