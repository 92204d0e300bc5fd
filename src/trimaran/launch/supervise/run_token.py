"""The token of a run whose nodes have no disk in common: from the environment or a file, never from an argument."""

import time
from collections.abc import MutableMapping
from pathlib import Path

from trimaran.core import UserError
from trimaran.core.regular_files import read_regular_text
from trimaran.runs import RunDirectory
from trimaran.runs.lease import new_token, run_token, write_once

VARIABLE = "TRIMARAN_RUN_TOKEN"
MIN_CHARACTERS = 16
WAIT_SECONDS = 30.0  # until the head has written the file, which may be in a home directory that the nodes share
POLL_SECONDS = 0.2


def given_token(environment: MutableMapping[str, str], file: Path | None, *, is_head: bool) -> str:
    """Return the token that this node was given; "" if none. The head creates `file` if it does not exist.

    The variable is removed from `environment`: ranks get the token in another way.
    """
    token = environment.pop(VARIABLE, "").strip()
    where = VARIABLE
    if not token and file is not None:
        where = f"--token-file {file}"
        if is_head and not file.exists():
            write_once(file, new_token() + "\n")
        token = _read(file)
    if token and len(token) < MIN_CHARACTERS:
        raise UserError("L023", f"the run's token is shorter than {MIN_CHARACTERS} characters", where=where,
                        fix="make one: python -c 'import secrets; print(secrets.token_urlsafe(32))'")  # fmt: skip
    return token


def needed_token(token: str, run: RunDirectory) -> str:
    """Return the token, or that which an earlier start of this node has kept. Raises if there is none."""
    if token:
        return token
    if (run.lease / "token").is_file():
        return run_token(run)
    raise UserError("L023", "this node has no token of the run", where=f"--token-file, {VARIABLE}",
                    fix="give every node the head's token: the file lease/token in its run directory")  # fmt: skip


def keep_token(run: RunDirectory, token: str) -> None:
    """Make `token` the run's token in its directory."""
    if token and (not (run.lease / "token").is_file() or run_token(run) != token):
        run.lease.mkdir(mode=0o700, exist_ok=True)
        (run.lease / "token").unlink(missing_ok=True)
        write_once(run.lease / "token", token + "\n")
        run_token(run)  # refuses a folder that others can read


def _read(file: Path) -> str:
    until = time.monotonic() + WAIT_SECONDS
    while not file.exists() and time.monotonic() < until:
        time.sleep(POLL_SECONDS)
    try:
        if file.stat().st_mode & 0o007:
            raise UserError("L023", "other users can read or change the token file", where=f"--token-file {file}",
                            fix=f"make it private: chmod 600 {file}")  # fmt: skip
        return read_regular_text(file, follow_links=True).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("L023", f"the token file cannot be read: {error}", where=f"--token-file {file}",
                        fix="copy it from the head, readable only by you") from None  # fmt: skip
