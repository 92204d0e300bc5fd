"""A tool that receives NVTX ranges as Nsight Systems does: a shared library that NVTX loads into a process."""

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent / "nvtx_tool.c"


@dataclass(slots=True)
class NvtxRange:
    """A range that a process opened and closed, and those inside it."""

    text: str
    nanoseconds: int = 0
    inside: list["NvtxRange"] = field(default_factory=list)

    def paths(self, above: str = "") -> list[str]:
        """Return the range and all inside it in order, each with those around it, such as `step 3 > forward`."""
        path = f"{above} > {self.text}" if above else self.text
        return [path, *(found for each in self.inside for found in each.paths(path))]

    def all(self) -> Iterator["NvtxRange"]:
        """Yield the range and all inside it."""
        yield self
        for each in self.inside:
            yield from each.all()


def build_nvtx_tool(folder: Path) -> Path:
    """Compile the tool into `folder` and return the library."""
    pytest.importorskip("nvtx")
    compiler, library = shutil.which("cc"), folder / "nvtx_tool.so"
    if compiler is None:
        pytest.skip("needs a C compiler")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(SOURCE)], check=True)
    return library


def use_nvtx_tool(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Load the tool into processes that use NVTX from now on. Returns the folder that it writes to."""
    output = folder / "ranges"
    output.mkdir()
    monkeypatch.setenv("NVTX_INJECTION64_PATH", str(build_nvtx_tool(folder)))
    monkeypatch.setenv("NVTX_TOOL_FOLDER", str(output))
    return output


def read_ranges(folder: Path) -> list[dict[str, list[NvtxRange]]]:
    """Return the ranges of each process by thread, the first thread first. All must be closed, each on its thread."""
    return [_read(path) for path in sorted(folder.iterdir(), key=lambda path: int(path.name))]


def _read(path: Path) -> dict[str, list[NvtxRange]]:
    stacks: dict[str, list[NvtxRange]] = {}
    for line in path.read_text().splitlines():
        thread, when, change = line.split(" ", 2)
        stack = stacks.setdefault(thread, [NvtxRange("")])
        if change == "-":
            stack.pop().nanoseconds += int(when)
            assert stack, f"thread {thread} closed a range that it had not opened"
        else:
            stack.append(NvtxRange(change[1:], -int(when)))
            stack[-2].inside.append(stack[-1])
    left = {thread: stack[-1].text for thread, stack in stacks.items() if len(stack) > 1}
    assert not left, f"ranges were never closed: {left}"
    return {thread: stack[0].inside for thread, stack in stacks.items()}
