"""Stands in for the command `nsys`, which no machine of ours has: it knows the options that we use, and refuses others.

`profile` runs the command with the NVTX tool of this folder, and keeps the ranges in the file of `--output`. `stats`
prints them as the report `nvtx_pushpop_sum` does.
"""

import os
import subprocess
import sys
from pathlib import Path

from tests.nvtx_tool import NvtxRange, read_ranges

FLAGS = {
    "--trace": ("nvtx,osrt", "cuda,nvtx,osrt,cudnn,cublas"),
    "--capture-range": ("cudaProfilerApi",),
    "--capture-range-end": ("stop",),
    "--sample": ("none",),
    "--cpuctxsw": ("none",),
    "--force-overwrite": ("true",),
}
HEADER = "Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Style,Range"


def profile(arguments: list[str]) -> int:
    output = Path()
    while arguments[0].startswith("-"):
        name, _, value = arguments.pop(0).partition("=")
        if name == "--output":
            output = Path(value)
        elif value not in FLAGS.get(name, ()):
            print(f"unrecognised option {name}={value}", file=sys.stderr)
            return 1
    folder = output.with_suffix(".ranges")
    folder.mkdir()
    output.write_text(str(folder))
    tool = {"NVTX_INJECTION64_PATH": os.environ["STAND_IN_TOOL"], "NVTX_TOOL_FOLDER": str(folder)}
    return subprocess.run(arguments, env=os.environ | tool).returncode


def stats(arguments: list[str]) -> int:
    *flags, file = arguments
    assert flags == ["--report=nvtx_pushpop_sum", "--format=csv", "--force-export=true", "--quiet"]
    ranges: dict[str, list[int]] = {}
    for process in read_ranges(Path(Path(file).read_text())):
        for thread in process.values():
            for each in NvtxRange("", inside=thread).all():
                ranges.setdefault(each.text, []).append(each.nanoseconds)
    ranges.pop("")
    print(f"Processing [{file}] with [nvtx_pushpop_sum.py]...\n\n{HEADER}")
    for text, took in ranges.items():
        print(f'0.0,{sum(took)},{len(took)},0.0,0.0,{min(took)},{max(took)},0.0,PushPop,":{text}"')
    return 0


if __name__ == "__main__":
    sys.exit({"profile": profile, "stats": stats}[sys.argv[1]](sys.argv[2:]))
