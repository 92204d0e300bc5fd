"""Tokens per second and peak memory of Trimaran and its peers on the same work, in one run on this machine.

usage: python benchmarks/throughput.py OUT.jsonl [--only CONTEST[/PEER],...] [--peers PEER,...] [--rounds 2]
                                       [--windows 3] [--steps 6] [--seconds 560] [--set FIELD=VALUE ...]
                                       [--shape tiny] [--layers 1] [--eager]
       python benchmarks/throughput.py --table OUT.jsonl [MORE.jsonl ...]

Every peer is a separate process that trains on random tokens, drawn from a seed beforehand, with AdamW (fused, fp32
states, decay 0.1) and gradients clipped at 1.0. The peers of a contest alternate, in reverse order in every other
round; while one uses the device the next one imports. A step is timed between two CUDA events, so nothing synchronises
between steps; a peer's figure is the median over the windows of steps of all its rounds. Each process appends its line
to OUT.jsonl when it ends, a failed one with the end of its error; none is started after `--seconds`. `--set` applies to
Trimaran only. All share one compile cache, so the second round starts warm. A run with `--layers 1` and the same
`--folder` fills it beforehand, since peers compile a layer once, however many there are.

In the contests `small-*`, `eager-*` and `cpu-*` all peers of a contest are in memory at once and alternate window by
window (`peers/alternate.py`). `--only 'small-*'` selects all that start so. `trimaran` is our trainer in the peer's
process, with telemetry and memory copies; `trimaran+run` is the command `trimaran train` with its supervisor, and every
window a run of its own. `python -m benchmarks.regression OUT.jsonl` compares the result with stored ratios.

For machines without a package index, torchtitan and the pure Python packages that it needs are in `.gpu-peers` (8 MB;
not in git). torchtitan 0.2.2 works, too. Create it with

    pip install --no-deps --no-compile --only-binary=:all: --target .gpu-peers \
        torchtitan==0.3.0 torchdata==0.11.0 tyro==1.0.16 docstring-parser typeguard einops liger-kernel \
        spmd_types==0.2.3 torch_checkpointing
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).absolute().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # instead of this folder, whose file names shadow libraries

from benchmarks.peers import alternate  # noqa: E402
from benchmarks.peers.contests import CONTESTS, works  # noqa: E402
from benchmarks.peers.table import speed, tables  # noqa: E402
from benchmarks.peers.work import Work  # noqa: E402

MAX_STARTED = 4  # processes; the next ones import while one uses the device
EXCEPTION = re.compile(r"(\[rank\d+\]: )?[\w.]*(Error|Exception)\b: ")
TINY: dict[str, Any] = {"shape": "tiny", "seq_len": 64, "micro_batch": 2}
# torchtitan's own start script sets this, and it is usual with recompute.
EXPANDABLE_SEGMENTS = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def in_turn(peers: Iterable[Work], rounds: int) -> Iterator[Work]:
    """Yield the peers of one contest for every round, in reverse order in every other one."""
    order = list(peers)
    for number in range(rounds):
        yield from order[:: -1 if number % 2 else 1]


def wanted(only: str, asked: dict[str, Any], *, peers: str = "") -> dict[str, list[Work]]:
    """Return the work of each contest that `only` names; `extra` peers must be named explicitly.

    `peers` names the peers of all contests, where these have them. A `*` at the end of a contest stands for anything.
    """
    chosen: dict[str, list[Work]] = {}
    for word in _each_contest(only):
        name, _, peer = word.partition("/")
        if name not in CONTESTS or (peer and peer not in CONTESTS[name].peers):
            raise SystemExit(f"there is no {word}; there are {', '.join(CONTESTS)}, each /PEER")
        named = [peer] if peer else [each for each in CONTESTS[name].peers if each not in CONTESTS[name].extra]
        if peers and not peer:
            named = [each for each in CONTESTS[name].peers if each in peers.split(",")]
        every = works(name, CONTESTS[name], asked)
        chosen.setdefault(name, []).extend(every[each] for each in named)
    return chosen


def _each_contest(only: str) -> list[str]:
    if not only:
        return list(CONTESTS)
    words: list[str] = []
    for word in filter(None, only.split(",")):
        start = word.removesuffix("*")
        words += [word] if start == word else [name for name in CONTESTS if name.startswith(start)]
    return words


def with_settings(work: Work, settings: list[str]) -> Work:
    """Return the work; for Trimaran, `settings` override its recipe."""
    if not work.peer.startswith("trimaran") or not settings:
        return work
    return replace(work, options=work.options | {"set": [*work.options.get("set", ()), *settings]})


def start(work: Work, folder: Path, number: int) -> subprocess.Popen[str]:
    """Start the process of one peer, which waits for its turn to use the device."""
    return start_child(work, folder, number, [str(folder / "turn"), str(time.time())])


def start_child(work: Work, folder: Path, number: int, arguments: list[str], **changes: str) -> subprocess.Popen[str]:
    """Start the process of one peer. `changes` are environment variables."""
    file = folder / f"work-{number}.json"
    file.write_text(json.dumps(work.fields()))
    found = [str(ROOT / ".gpu-peers"), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    outer = {
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // work.ranks)),
        "TORCHINDUCTOR_CACHE_DIR": str((folder / "compiled").absolute()),
        "TOKENIZERS_PARALLELISM": "false",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(found),
        **changes,
    }
    if work.peer.startswith("torchtitan") or (work.peer == "loop" and work.recompute != "none"):
        outer |= EXPANDABLE_SEGMENTS
    command = [sys.executable, "-m", "benchmarks.peers.child", str(file.absolute()), *arguments]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (folder / f"{number}.err").open("w") as errors:
        return subprocess.Popen(command, env=outer, cwd=ROOT, stderr=errors, **pipes)


def alternate_all(contests: list[list[Work]], into: Path, folder: Path, *, seconds: float, parallel: int) -> list[Work]:
    """Append a line to `into` for every peer of contests that alternate; return the work that had no time left."""

    def start_peer(work: Work, number: int) -> subprocess.Popen[str]:
        threads = alternate.compile_threads(parallel)
        return start_child(work, folder, number, [], TORCHINDUCTOR_COMPILE_THREADS=threads)

    def save(peer: alternate.Waiting) -> None:
        line = peer.line or peer.partial_line()
        if line is None:
            peer.process.kill()
            peer.process.wait()
            line = failure(peer.work, folder / f"{peer.number}.err")
        append(into, peer.work, line, "")

    return alternate.run(contests, start_peer, save, parallel=parallel, until=time.monotonic() + seconds)


def line_of(work: Work, process: subprocess.Popen[str], errors: Path, limit: float) -> dict[str, Any]:
    """Return the result line of a process after it has ended, or why it failed."""
    try:
        out, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return {"contest": work.contest, "peer": work.peer, "failed": f"it took more than {limit:.0f} s"}
    lines = out.strip().splitlines()
    if process.returncode == 0 and lines:
        return json.loads(lines[-1])
    return failure(work, errors)


def failure(work: Work, errors: Path) -> dict[str, Any]:
    """Return the line of a peer that failed."""
    stderr = [line for line in errors.read_text(errors="replace").splitlines() if line.strip()]
    return {"contest": work.contest, "peer": work.peer, "failed": _error_line(stderr), "errors": stderr[-40:]}


def append(into: Path, work: Work, line: dict[str, Any], suffix: str) -> None:
    with into.open("a") as file:
        print(json.dumps(line), file=file, flush=True)
    result = line.get("failed")
    if not result:
        steps = 1000 * statistics.median(line["seconds"]), 1000 * statistics.mean(line["seconds"])
        result = f"{speed([line]):,.0f} tokens/s, step median {steps[0]:.2f} mean {steps[1]:.2f} ms"
        result += f", {line['peak_bytes'] / 2**30:.1f} GiB"
    print(f"{work.contest}/{work.peer}: {result}{suffix}", flush=True)


def _error_line(stderr: list[str]) -> str:
    """Return the line that names the error: the last one that starts with an exception, else the last one."""
    named = [line for line in stderr if EXCEPTION.match(line)]
    return (named or stderr or ["no error output"])[-1][:300]


def measure_all(todo: list[Work], into: Path, folder: Path, *, seconds: float, limit: float) -> list[Work]:
    """Append a line to `into` for each process that started in time, and return the work of those that did not."""
    end, queue, running = time.monotonic() + seconds, list(enumerate(todo)), []
    while queue or running:
        while queue and len(running) < MAX_STARTED and time.monotonic() < end:
            number, work = queue.pop(0)
            running.append((number, work, start(work, folder, number), time.monotonic()))
        if not running:
            break
        number, work, process, began = running.pop(0)
        line = line_of(work, process, folder / f"{number}.err", limit)
        append(into, work, line, f" ({time.monotonic() - began:.0f} s)")
    return [work for _, work in queue]


def read(files: Iterable[Path]) -> list[dict[str, Any]]:
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("into", type=Path, nargs="?")
    parser.add_argument("--table", type=Path, nargs="+", help="print the tables of existing results")
    parser.add_argument("--only", default="", help="CONTEST or CONTEST/PEER, separated by commas")
    parser.add_argument("--peers", default="", help="only these peers of the contests, separated by commas")
    parser.add_argument("--rounds", type=int, default=2, help="of processes; 1 for contests that alternate")
    parser.add_argument("--windows", type=int, help="default: the contest's")
    parser.add_argument("--steps", type=int, help="steps per window; default: the contest's")
    parser.add_argument("--warm", type=int, help="steps before the first window; default: the contest's")
    parser.add_argument("--parallel", type=int, default=6, help="peers that compile at once where they alternate")
    parser.add_argument("--seconds", type=float, default=560, help="no process is started after this time")
    parser.add_argument("--limit", type=float, default=300, help="seconds after which a process is killed")
    parser.add_argument("--set", action="append", default=[], help="a setting of Trimaran's recipe")
    parser.add_argument("--shape", choices=["tiny"], help="shrinks every contest, to try it on a CPU")
    parser.add_argument("--layers", type=int, help="overrides the layers of the shapes")
    parser.add_argument("--precision", help="overrides the precision of the contests")
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument("--folder", type=Path, help="for the compile cache and the errors; default: a temporary one")
    options = parser.parse_args()
    if options.table:
        if missing := [str(each) for each in options.table if not each.is_file()]:
            parser.error(f"there is no {', '.join(missing)}: name files that this script has written")
        print(tables(read(options.table)))
        return
    if options.into is None:
        parser.error("name the file that the results are appended to")
    asked = {name: getattr(options, name) for name in ("windows", "steps", "warm") if getattr(options, name)}
    asked |= TINY if options.shape else {}
    asked |= {"compile": False} if options.eager else {}
    asked |= {"layers": options.layers} if options.layers else {}
    asked |= {"precision": options.precision} if options.precision else {}
    chosen = wanted(options.only, asked, peers=options.peers)
    chosen = {name: [with_settings(work, options.set) for work in each] for name, each in chosen.items()}
    together = [each for name, each in chosen.items() if CONTESTS[name].together]
    todo = [
        work for name, each in chosen.items() if not CONTESTS[name].together for work in in_turn(each, options.rounds)
    ]
    ends = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        left = alternate_all(together, options.into, folder, seconds=options.seconds, parallel=options.parallel)
        left += measure_all(todo, options.into, folder, seconds=ends - time.monotonic(), limit=options.limit)
    print(f"{len(left)} left{':' if left else ''} {', '.join(f'{work.contest}/{work.peer}' for work in left)}\n")
    print(tables(read([options.into])))


if __name__ == "__main__":
    main()
