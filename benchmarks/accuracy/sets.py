"""Every set of measured runs: whether a constant was set by it, its errors, and its rows."""

import csv
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.accuracy.errors import Case, Errors, summarise
from benchmarks.accuracy.measures import OWN, OWN_LATER, OWN_SMALL

from trimaran.cost import STACKS
from trimaran.cost.collective import NETWORK_GATHER_EFFICIENCY, NETWORK_HOP_FACTOR, RING_EFFICIENCY
from trimaran.cost.gradient_traffic import COLLECTIVE_SLOWDOWN
from trimaran.cost.roofline import KERNELS, SUSTAINED_FRACTION

MAX_ROWS_ON_PAGE = 40  # of a set; of a larger one, those with the largest errors
NUM_WORST = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSet:
    """A set of runs. `sets`: the constants that were set by it; empty if it was only scored (held out)."""

    name: str
    sets: str = ""
    note: str = ""


RUN_SETS = (
    RunSet(name="nanotron", sets="nanotron's profile, rings, H100", note="1B and 8B, 8 to 512 H100"),
    RunSet(name="llm-foundry", sets="llm-foundry's profile, A100", note="MPT, 8 to 128 A100"),
    RunSet(name="Megatron 7B", sets="Megatron's memory", note="deterministic mode, which makes steps slower"),
    RunSet(name="NVIDIA 405B, Grok-1", sets="Megatron's profile, GB200", note="DGX Cloud recipes, H100 and GB200"),
    RunSet(name="NVIDIA Nemotron-4", note="the same recipes, 15B and 340B"),
    RunSet(name="Korthikanti", note="GPT 22B to 1T on A100, before flash attention"),
    RunSet(name="torchtitan", note="Llama 8B to 70B on 64 A100; no memory published"),
    RunSet(name="Megatron-Bridge", note="Llama 70B fine-tuned in fp8; Qwen3-30B-A3B; memory as GB of rank 0"),
    RunSet(name="InternEvo", note="its own trainer, predicted as Megatron; slower networks than the catalogue's"),
    RunSet(name="Megatron SC21", note="2021, before flash attention; half of it DeepSpeed's ZeRO-3 on 384 to 1,536"),
    RunSet(name="BigScience", note="before flash attention; memory is nvidia-smi's"),
    RunSet(name=OWN, sets="our trainer's profile, H200"),
    RunSet(name=OWN_SMALL, sets="our trainer's host and launches"),
    RunSet(name=OWN_LATER, note="measured after every constant had been set"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SetConstant:
    """A constant that was fitted, its value in the code, and the rows that it was set by."""

    name: str
    value: Callable[[], object]
    rows: str


def _time(stack: str, field: str) -> Callable[[], object]:
    return lambda: getattr(STACKS[stack].time, field)


def _memory(stack: str, field: str) -> Callable[[], object]:
    return lambda: getattr(STACKS[stack].memory, field)


def _sustained(*devices: str) -> Callable[[], object]:
    return lambda: " / ".join(str(SUSTAINED_FRACTION[each]) for each in devices)


def _megatron_h100() -> object:
    return dict(STACKS["megatron"].time.sustained)["H100"]


def _kernel(*key: str) -> Callable[[], object]:
    return lambda: next("{} / {}".format(*kernel[:2]) for name, kernel in KERNELS.items() if name == key)


CONSTANTS = (
    SetConstant(name="steady matmul rate of A100-40GB / A100-80GB", value=_sustained("A100-40GB", "A100"),
                rows="llm-foundry"),
    SetConstant(name="steady matmul rate of H100", value=_sustained("H100"), rows="nanotron, clean"),
    SetConstant(name="steady matmul rate of H100, Megatron", value=_megatron_h100,
                rows="NVIDIA: 405B in bf16 on H100 (1 row)"),
    SetConstant(name="steady matmul rate of H200", value=_sustained("H200"), rows="our trainer, H200"),
    SetConstant(name="steady matmul rate of GB200", value=_sustained("GB200"),
                rows="NVIDIA: 405B in bf16 on GB200 (3 rows); assumed for B200, B300 and GB300"),
    SetConstant(name="Megatron: crowded_fraction", value=_time("megatron", "crowded_fraction"),
                rows="NVIDIA: 405B in bf16 on H100, 0.95 full (1 row)"),
    SetConstant(name="Megatron: expert_imbalance", value=lambda: STACKS["megatron"].time.comm.expert_imbalance,
                rows="NVIDIA: Grok-1 (6 rows)"),
    SetConstant(name="Megatron: fragmentation", value=_memory("megatron", "fragmentation"), rows="Megatron 7B"),
    SetConstant(name="nanotron: fragmentation", value=_memory("nanotron", "fragmentation"), rows="nanotron"),
    SetConstant(name="nanotron: gathered_input_bytes, update_bytes",
                value=lambda: f"{STACKS['nanotron'].memory.gathered_input_bytes[0]}, "
                              f"{STACKS['nanotron'].memory.update_bytes[0]}", rows="nanotron"),
    SetConstant(name="nanotron: crowded_fraction", value=_time("nanotron", "crowded_fraction"), rows="nanotron"),
    SetConstant(name="nanotron: dp_overlap", value=_time("nanotron", "dp_overlap"), rows="nanotron, clean"),
    SetConstant(name="llm-foundry: crowded_fraction", value=_time("llm-foundry", "crowded_fraction"),
                rows="llm-foundry"),
    SetConstant(name="ring bandwidth, network gathers, hops",
                value=lambda: f"{RING_EFFICIENCY}, {NETWORK_GATHER_EFFICIENCY}, {NETWORK_HOP_FACTOR}",
                rows="nanotron, and its table of NCCL bandwidths"),
    SetConstant(name="computing slowed by collectives", value=lambda: COLLECTIVE_SLOWDOWN, rows="llm-foundry"),
    SetConstant(name="FlashAttention 1 on A100", value=_kernel("flash-1", "ampere"), rows="llm-foundry"),
    SetConstant(name="FlashAttention 1 on H100", value=_kernel("flash-1", "hopper"),
                rows="none: A100's rate, times multiprocessors and clock"),
    SetConstant(name="FlashAttention 2 on H100", value=_kernel("flash-2", "hopper"), rows="nanotron, clean"),
    SetConstant(name="cuDNN's attention on Hopper", value=_kernel("cudnn", "hopper"),
                rows="kernels on one H200; assumed for Blackwell"),
    SetConstant(name="FlashAttention 2 on MI300X", value=_kernel("flash-2", "cdna"),
                rows="none: one published kernel; backward is assumed"),
)  # fmt: skip


def constants_table() -> list[list[str]]:
    """Return the constants with the rows that they were set by."""
    return [
        ["constant", "value", "set by"],
        *([each.name, str(each.value()).strip("()"), each.rows] for each in CONSTANTS),
    ]


def sets_table(ours: Mapping[str, Sequence[Case]]) -> list[list[str]]:
    """Return the errors of every set: median, mean, bias and the worst row, of memory and of speed."""
    columns = ["median", "mean", "bias", "worst"]
    rows = [["set", "rows", "kind", *(f"memory, {each}" for each in columns), *(f"speed, {each}" for each in columns)]]
    for each in RUN_SETS:
        cases = ours[each.name]
        memory, speed = (
            _figures(summarise(getattr(case, error) for case in cases)) for error in ("memory_error", "speed_error")
        )
        rows.append([each.name, str(len(cases)), "development" if each.sets else "held out", *memory, *speed])
    return rows


def _figures(found: Errors | None) -> list[str]:
    if found is None:
        return ["-"] * 4
    sizes = (percent(each, signed=False) for each in (found.median, found.mape))
    return [*sizes, percent(found.bias), percent(found.worst)]


def percent(value: float | None, *, signed: bool = True) -> str:
    return "-" if value is None else f"{100 * value:{'+' if signed else ''}.1f} %"


def row_tables(ours: Mapping[str, Sequence[Case]]) -> Iterator[tuple[str, list[list[str]]]]:
    """Yield the rows of each published set with a heading: all of a small set, the worst of a large one."""
    for each in RUN_SETS:
        if each.name in (OWN, OWN_LATER):  # the page has tables of their own for them
            continue
        cases = list(ours[each.name])
        heading = f"{each.name}, {len(cases)} rows" + (f": {each.note}" if each.note else "")
        if len(cases) > MAX_ROWS_ON_PAGE:
            heading += f"; the {NUM_WORST} worst"
            cases = sorted(cases, key=_size)[-NUM_WORST:][::-1]
        yield heading, [list(COLUMNS), *(_row(case) for case in cases)]


def _size(case: Case) -> float:
    return max(abs(case.memory_error or 0.0), abs(case.speed_error or 0.0))


COLUMNS = (
    "model", "GPUs", "plan", "GiB", "predicted", "error", "tokens/s a GPU", "predicted", "error", "fits",
)  # fmt: skip


def _row(case: Case) -> list[str]:
    run, peak, speed = case.run, case.peak_bytes, case.tokens_per_second_per_gpu
    fits = "-" if case.fits is None else "yes" if case.fits else "no"
    return [
        run.row.get("name") or run.model, f"{run.gpus} {run.line['cluster']['gpu']}", plan_text(run.line["plan"]),
        _number(run.peak_gib), _number(None if peak is None or not run.peak_gib else peak / 2**30),
        percent(case.memory_error), _number(run.tokens_per_second_per_gpu), _number(speed), percent(case.speed_error),
        fits + (", failed" if run.failed else ""),
    ]  # fmt: skip


def _number(value: float | None) -> str:
    return "-" if not value else f"{value:,.2f}" if value < 100 else f"{value:,.0f}"


def plan_text(plan: Mapping[str, object]) -> str:
    """Return the plan of a line as short text: `tp 8 pp 8 dp 4, fp8, micro-batch 1, full`."""
    mesh = plan.get("mesh", {})
    assert isinstance(mesh, Mapping)
    axes = " ".join(f"{axis.replace('dp_', '')} {degree}" for axis, degree in mesh.items() if degree != 1)
    words = [axes or "one rank", str(plan.get("precision", "bf16")), f"micro-batch {plan.get('micro_batch', 1)}"]
    words += [f"recompute {plan['recompute']}"] if plan.get("recompute", "none") != "none" else []
    words += ["no sequence parallelism"] if plan.get("sequence_parallel") is False and mesh.get("tp", 1) != 1 else []
    words += [f"{plan[key]}" for key in ("sharding",) if plan.get(key, "none") != "none"]
    return ", ".join(words)


def rows_csv(ours: Mapping[str, Sequence[Case]]) -> str:
    """Return every row of every set as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["set", "kind", *COLUMNS[:3], "measured_gib", "predicted_gib", "memory_error",
                     "measured_tokens_per_s_per_gpu", "predicted_tokens_per_s_per_gpu", "speed_error",
                     "predicted_to_fit", "failed"])  # fmt: skip
    for each in RUN_SETS:
        for case in ours[each.name]:
            run, (model, gpus, plan, *_) = case.run, _row(case)
            figures = (run.peak_gib, None if case.peak_bytes is None else case.peak_bytes / 2**30, case.memory_error,
                       run.tokens_per_second_per_gpu, case.tokens_per_second_per_gpu, case.speed_error)  # fmt: skip
            writer.writerow([each.name, "development" if each.sets else "held out", model, gpus, plan,
                             *("" if figure is None else f"{figure:.5g}" for figure in figures),
                             case.fits, run.failed])  # fmt: skip
    return text.getvalue()
