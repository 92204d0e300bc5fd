"""Ranks of one machine that multiply and add, to see whether they do it right and how fast."""

import multiprocessing
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from trimaran.probe.calibrate import product_flops

START_SECONDS = 60.0  # that ranks may take to find each other, on a busy machine
SHAPE = {"cuda": (8192, 8192, 8192), "cpu": (768, 768, 768)}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Lengths of the messages whose sums are looked at: odd ones, whose last piece is smaller, and a large one.
LENGTHS = {"cpu": (1, 17, 4099, 1 << 20), "cuda": (1, 17, 4099, (1 << 20) + 3, 1 << 25)}
LARGE_BYTES = {"cpu": 1 << 22, "cuda": 1 << 28}
MODULUS = 1021  # below 1024, so that sums over 16,384 ranks are whole numbers that float32 knows

Work = Callable[..., Any]


def run_forked(function: Work, places: list[tuple[Any, ...]], *, seconds: float) -> list[Any]:
    """Return what `function(*place)` answers in a forked process for each place. None: it died, hung or failed."""
    context = multiprocessing.get_context("fork")
    pipes: dict[Connection, int] = {}
    workers = []
    for number, place in enumerate(places):
        ours, theirs = context.Pipe(duplex=False)
        worker = context.Process(target=_child, args=(theirs, function, place), daemon=True)
        worker.start()
        theirs.close()  # so that a child that dies closes its end
        pipes[ours] = number
        workers.append(worker)
    answers: list[Any] = [None] * len(places)
    end = time.monotonic() + seconds
    try:
        while pipes and (ready := wait(list(pipes), max(0.0, end - time.monotonic()))):
            for pipe in ready:
                assert isinstance(pipe, Connection)
                number = pipes.pop(pipe)
                try:
                    answers[number] = pipe.recv()
                except EOFError:
                    answers[number] = {"error": "a rank died without a word"}
        return answers
    finally:
        for worker in workers:
            worker.kill()
            worker.join()


def _child(pipe: Connection, function: Work, place: tuple[Any, ...]) -> None:
    try:
        pipe.send(function(*place))
    except Exception as error:  # the parent tells it
        pipe.send({"error": f"{type(error).__name__}: {error}".splitlines()[0]})
    pipe.close()
    time.sleep(START_SECONDS)  # until the parent ends us all: others may still need what we hold


def measure_products(kind: str, *, devices: int, cores: int, seconds: float) -> dict[str, Any]:
    """Return flops a second of each device; the cores of a CPU are one."""
    precision = "bf16" if kind == "cuda" else "fp32"
    if kind == "cpu":
        places: list[tuple[Any, ...]] = [("cpu", 0, cores, "fp32", seconds)]
    else:
        places = [("cuda", index, 1, precision, seconds) for index in range(devices)]
    answers = run_forked(_multiply, places, seconds=START_SECONDS + seconds)
    names = ["the CPU"] if kind == "cpu" else [f"GPU {index}" for index in range(devices)]
    told = {
        name: answer or {"error": "it did not finish a product"} for name, answer in zip(names, answers, strict=True)
    }
    return {
        "rates": {name: answer["flops"] for name, answer in told.items() if "flops" in answer},
        "failures": {name: answer["error"] for name, answer in told.items() if "error" in answer},
        "precision": precision,
        "capabilities": [answer["capability"] for answer in told.values() if "capability" in answer],
    }


def see_cuda() -> dict[str, Any]:
    """Return what torch's CUDA is; raises where it cannot be used."""
    torch.cuda.init()
    return {"archs": torch.cuda.get_arch_list(), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}


def _multiply(kind: str, index: int, cores: int, precision: str, seconds: float) -> dict[str, Any]:
    if kind == "cpu":
        torch.set_num_threads(cores)
        return {"flops": product_flops(DTYPES[precision], SHAPE[kind], torch.device(kind), seconds=seconds)}
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    major, minor = torch.cuda.get_device_capability(device)
    told = {"capability": f"sm_{major}{minor}"}
    dtype = DTYPES[precision] if (major, minor) >= (8, 0) else torch.float16
    flops = product_flops(dtype, SHAPE[kind], device, seconds=seconds)
    return told | ({"flops": flops} if flops else {"error": f"no kernel for {precision} on GPU {index}"})


def measure_sums(kind: str, ranks: int, *, seconds: float) -> dict[str, Any]:
    """Return whether sums over `ranks` came out right, and how long a large one takes. Fewer than two: nothing."""
    backend = "nccl" if kind == "cuda" else "gloo"
    with TemporaryDirectory() as folder:
        places = [(kind, rank, ranks, f"{folder}/meet", seconds) for rank in range(ranks)]
        answers = run_forked(_sum_here, places, seconds=START_SECONDS + 4 * seconds)
    return verdict(answers, backend)


def verdict(answers: list[Any], backend: str) -> dict[str, Any]:
    """Return one answer out of those of all ranks; an error where a rank had one or said nothing."""
    errors = {rank: answer["error"] for rank, answer in enumerate(answers) if answer and "error" in answer}
    silent = [rank for rank, answer in enumerate(answers) if answer is None]
    told = {"ranks": len(answers), "backend": backend}
    if errors or silent:
        first = next(iter(errors), None)
        words = f"rank {first}: {errors[first]}" if first is not None else f"rank {silent[0]} did not finish"
        return told | {"error": words}
    wrong = {rank: answer["wrong"] for rank, answer in enumerate(answers) if answer["wrong"]}
    return told | {
        "checked": answers[0]["checked"],
        "wrong": wrong,
        "bytes": answers[0]["bytes"],
        "seconds": max(answer["seconds"] for answer in answers),
    }


def _sum_here(kind: str, rank: int, ranks: int, meet: str, seconds: float) -> dict[str, Any]:
    return sum_with(dist.FileStore(meet, ranks), kind, rank, ranks, seconds=seconds, limit=START_SECONDS)


def sum_with(
    store: dist.Store, kind: str, rank: int, ranks: int, *, seconds: float, limit: float
) -> dict[str, Any]:  # fmt: skip
    """Sum with all `ranks` that come to `store`, and return what was wrong of it here and how long a large sum took."""
    torch.set_num_threads(1)
    local = rank % max(1, torch.cuda.device_count()) if kind == "cuda" else 0
    device = torch.device("cuda", local) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=limit))
    wrong, checked = count_wrong(rank, ranks, LENGTHS[kind], device), sum(LENGTHS[kind])
    took = time_sum(LARGE_BYTES[kind], device, seconds=seconds)
    return {"wrong": wrong, "checked": checked, "bytes": LARGE_BYTES[kind], "seconds": took}


def pattern(rank: int, length: int, device: torch.device) -> torch.Tensor:
    """Return whole numbers that differ by rank and place, so that a lost, doubled or shifted piece shows."""
    place = torch.arange(length, device=device, dtype=torch.int64)
    return ((place * 31 + rank * 17 + 1) % MODULUS).to(torch.float32)


def count_wrong(rank: int, ranks: int, lengths: tuple[int, ...], device: torch.device) -> int:
    """Return how many numbers of the sums are not exactly what they must be."""
    wrong = 0
    for length in lengths:
        message = pattern(rank, length, device)
        dist.all_reduce(message)
        expected = torch.zeros_like(message)
        for each in range(ranks):
            expected += pattern(each, length, device)
        wrong += int((message != expected).sum().item())
    return wrong


def time_sum(num_bytes: int, device: torch.device, *, seconds: float) -> float:
    """Return how long a sum of so many bytes takes, the best of several; all ranks stop after the same one."""
    message = torch.zeros(num_bytes // 4, device=device)
    dist.all_reduce(message)  # the first opens connections
    best, spent = float("inf"), 0.0
    while spent < seconds:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        dist.all_reduce(message)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        took = time.perf_counter() - start
        clock = torch.tensor([took], device=device, dtype=torch.float64)
        dist.all_reduce(clock, op=dist.ReduceOp.MAX)
        best, spent = min(best, took), spent + float(clock.item())
    return best
