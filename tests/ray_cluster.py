"""A real Ray cluster in a process of its own, see `tests.ray_nodes`."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).parents[1]


class RayCluster:
    """The nodes of a cluster, each with one CPU; token authentication is on."""

    def __init__(self, folder: Path, *, nodes: int) -> None:
        token = folder / "token"
        token.touch(mode=0o600)
        token.write_text("0123456789abcdef" * 4)
        ours = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_USAGE_STATS_ENABLED": "0"}
        self.environment: Mapping[str, str] = {**os.environ, **ours, "PYTHONPATH": f"{ROOT}/src:{ROOT}"}
        self._nodes = nodes

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "tests.ray_nodes", str(self._nodes)]
        self._process = subprocess.Popen(command, env=self.environment, cwd=ROOT, text=True,
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
        self.address = self._answer()["address"]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line.startswith("{"):
                return json.loads(line)
        raise AssertionError("the cluster has ended")

    def _ask(self, command: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self._answer()

    def add(self) -> str:
        """Add a node and return its address."""
        return self._ask("add")["node"]

    def remove(self, address: str) -> None:
        """Kill all processes of a node."""
        self._ask(f"remove {address}")
