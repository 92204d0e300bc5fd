"""What a coding assistant may name: runs by their name, files below the server's folder, and no code to execute."""

from collections.abc import Sequence
from pathlib import Path

from mcp.server.mcpserver.exceptions import ToolError

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
        """Raise ToolError unless the server may change something."""
        if not self.may_write:
            raise ToolError(f"this server only reads, so it cannot {what}: start it with `trimaran mcp --write`")

    def _refuse_outside(self, value: str) -> None:
        text = value.strip().strip("'\"")
        looks_like_path = text.startswith(("/", "~")) or ".." in Path(text).parts or (self.folder / text).is_symlink()
        if not looks_like_path:
            return
        if not (self.folder / Path(text).expanduser()).resolve().is_relative_to(self.folder):
            raise ToolError(f"{text[:120]} is outside of {self.folder}: start the server in a folder above it")
