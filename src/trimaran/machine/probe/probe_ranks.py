"""Matmuls and all-reduces on forked ranks of one machine: whether the results are right, and how long they take."""

import multiprocessing
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from trimaran.core.traits import DEVICE_TRAITS
from trimaran.machine.probe.calibrate import matmul_flops
from trimaran.machine.probe.collective_calls import synchronize, take_device

START_SECONDS = 60.0  # ranks may take this long to meet, on a busy machine
MATMUL_SHAPE = {"cuda": (8192, 8192, 8192), "cpu": (768, 768, 768)}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Message lengths whose sums are checked: odd ones, which do not split into equal chunks, and a large one.
CHECKED_LENGTHS = {"cpu": (1, 17, 4099, 1 << 20), "cuda": (1, 17, 4099, (1 << 20) + 3, 1 << 25)}
TIMED_BYTES = {"cpu": 1 << 22, "cuda": 1 << 28}
MODULUS = 1021  # below 1024, so that sums over 16,384 ranks are exact in float32

Work = Callable[..., Any]


def run_forked(function: Work, arguments: list[tuple[Any, ...]], *, seconds: float) -> list[Any]:
    """Return `function(*each)` for each of `arguments`, each run in a forked process.

    `{"error": ...}` stands for one that died or raised, None for one that did not end within `seconds`.
    """
    context = multiprocessing.get_context("fork")
    pipes: dict[Connection, int] = {}
    workers = []
    for number, each in enumerate(arguments):
        receiver, sender = context.Pipe(duplex=False)
        worker = context.Process(target=_child, args=(sender, function, each), daemon=True)
        worker.start()
        sender.close()  # so that the pipe closes when the child dies
        pipes[receiver] = number
        workers.append(worker)
    answers: list[Any] = [None] * len(arguments)
    end = time.monotonic() + seconds
    try:
        while pipes and (ready := wait(list(pipes), max(0.0, end - time.monotonic()))):
            for pipe in ready:
                assert isinstance(pipe, Connection)
                number = pipes.pop(pipe)
                try:
                    answers[number] = pipe.recv()
                except EOFError:
                    answers[number] = {"error": "a rank died without an error message"}
        return answers
    finally:
        for worker in workers:
            worker.kill()
            worker.join()


def _child(pipe: Connection, function: Work, arguments: tuple[Any, ...]) -> None:
    try:
        pipe.send(function(*arguments))
    except Exception as error:  # the parent reports it
        pipe.send({"error": f"{type(error).__name__}: {error}".splitlines()[0]})
    pipe.close()
    time.sleep(START_SECONDS)  # until the parent ends all children: others may still need this one's connections


def measure_matmuls(kind: str, *, devices: int, cores: int, seconds: float) -> dict[str, Any]:
    """Return the matmul flops per second of each device; all cores of a CPU are one device."""
    traits = DEVICE_TRAITS[kind]
    precision = "bf16" if traits.prefers_16_bits else "fp32"
    num_devices, threads = (1, cores) if traits.shares_cores else (devices, 1)
    arguments = [(kind, index, threads, precision, seconds) for index in range(num_devices)]
    answers = run_forked(_matmul, arguments, seconds=START_SECONDS + seconds)
    names = ["the CPU"] if traits.shares_cores else [f"GPU {index}" for index in range(devices)]
    by_name = {
        name: answer or {"error": "it did not finish a matmul"} for name, answer in zip(names, answers, strict=True)
    }
    return {
        "rates": {name: answer["flops"] for name, answer in by_name.items() if "flops" in answer},
        "failures": {name: answer["error"] for name, answer in by_name.items() if "error" in answer},
        "precision": precision,
        "capabilities": [answer["capability"] for answer in by_name.values() if "capability" in answer],
    }


def cuda_versions() -> dict[str, Any]:
    """Return CUDA's architectures and the NCCL version; raises where CUDA cannot be used."""
    torch.cuda.init()
    return {"archs": torch.cuda.get_arch_list(), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}


def _matmul(kind: str, index: int, cores: int, precision: str, seconds: float) -> dict[str, Any]:
    device = take_device(kind, index)
    if DEVICE_TRAITS[kind].shares_cores:
        torch.set_num_threads(cores)
        return {"flops": matmul_flops(DTYPES[precision], MATMUL_SHAPE[kind], device, seconds=seconds)}
    major, minor = torch.cuda.get_device_capability(device)
    capability = {"capability": f"sm_{major}{minor}"}
    dtype = DTYPES[precision] if (major, minor) >= (8, 0) else torch.float16
    flops = matmul_flops(dtype, MATMUL_SHAPE[kind], device, seconds=seconds)
    return capability | ({"flops": flops} if flops else {"error": f"no kernel for {precision} on GPU {index}"})


def measure_all_reduce(kind: str, ranks: int, *, seconds: float) -> dict[str, Any]:
    """Return whether all-reduces over `ranks` were right, and how long a large one takes."""
    with TemporaryDirectory() as folder:
        arguments = [(kind, rank, ranks, f"{folder}/store", seconds) for rank in range(ranks)]
        answers = run_forked(_all_reduce_here, arguments, seconds=START_SECONDS + 4 * seconds)
    return merge_answers(answers, DEVICE_TRAITS[kind].backend)


def merge_answers(answers: list[Any], backend: str) -> dict[str, Any]:
    """Return one answer from those of all ranks; an error if any rank failed or did not finish."""
    errors = {rank: answer["error"] for rank, answer in enumerate(answers) if answer and "error" in answer}
    unfinished = [rank for rank, answer in enumerate(answers) if answer is None]
    common = {"ranks": len(answers), "backend": backend}
    if errors or unfinished:
        first = next(iter(errors), None)
        error = f"rank {first}: {errors[first]}" if first is not None else f"rank {unfinished[0]} did not finish"
        return common | {"error": error}
    wrong = {rank: answer["wrong"] for rank, answer in enumerate(answers) if answer["wrong"]}
    return common | {
        "checked": answers[0]["checked"],
        "wrong": wrong,
        "bytes": answers[0]["bytes"],
        "seconds": max(answer["seconds"] for answer in answers),
    }


def _all_reduce_here(kind: str, rank: int, ranks: int, store_path: str, seconds: float) -> dict[str, Any]:
    return all_reduce_with(dist.FileStore(store_path, ranks), kind, rank, ranks, seconds=seconds, limit=START_SECONDS)


def all_reduce_with(
    store: dist.Store, kind: str, rank: int, ranks: int, *, seconds: float, limit: float
) -> dict[str, Any]:  # fmt: skip
    """Join a group of `ranks` in `store`; return how many sums were wrong here, and the time of a large all-reduce."""
    torch.set_num_threads(1)
    device = take_device(kind, rank)
    dist.init_process_group(
        DEVICE_TRAITS[kind].backend, store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=limit)
    )
    wrong, checked = count_wrong_values(rank, ranks, CHECKED_LENGTHS[kind], device), sum(CHECKED_LENGTHS[kind])
    took = time_all_reduce(TIMED_BYTES[kind], device, seconds=seconds)
    return {"wrong": wrong, "checked": checked, "bytes": TIMED_BYTES[kind], "seconds": took}


def pattern(rank: int, length: int, device: torch.device) -> torch.Tensor:
    """Return integers that depend on rank and position, so that a lost, doubled or shifted chunk changes the sum."""
    position = torch.arange(length, device=device, dtype=torch.int64)
    return ((position * 31 + rank * 17 + 1) % MODULUS).to(torch.float32)


def count_wrong_values(rank: int, ranks: int, lengths: tuple[int, ...], device: torch.device) -> int:
    """Return how many values of the all-reduced messages are not exactly right."""
    wrong = 0
    for length in lengths:
        message = pattern(rank, length, device)
        dist.all_reduce(message)
        expected = torch.zeros_like(message)
        for other in range(ranks):
            expected += pattern(other, length, device)
        wrong += int((message != expected).sum().item())
    return wrong


def time_all_reduce(num_bytes: int, device: torch.device, *, seconds: float) -> float:
    """Return how long an all-reduce of `num_bytes` takes, the fastest of several. All ranks stop after the same one."""
    message = torch.zeros(num_bytes // 4, device=device)
    dist.all_reduce(message)  # the first one opens connections
    best, spent = float("inf"), 0.0
    while spent < seconds:
        synchronize(device)
        start = time.perf_counter()
        dist.all_reduce(message)
        synchronize(device)
        took = time.perf_counter() - start
        slowest = torch.tensor([took], device=device, dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        best, spent = min(best, took), spent + float(slowest.item())
    return best
