"""The parity matrix: every axis and every combination of axes against one process, run with the real worker.

`python -m tests.matrix` runs all cases and prints a table; `--write FILE` saves it. `tests/dist/test_matrix.py` trains
every axis and every pair of axes, most of them without the worker around the steps.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, count, cycle, product
from pathlib import Path
from typing import Any

from tests.parity import Trajectory, differences, train_trajectory
from trimaran.core import AXES, Mesh, Plan, Recipe

DEGREE = 2
LARGEST_WORLD = 8
GLOBAL_BATCH = 16
STEPS = 10
SHAPE = {"layers": 4, "hidden": 32, "heads": 8, "kv_heads": 4, "head_dim": 8, "ffn": 64}

SHARDINGS = ("parameters", "gradients", "optimizer")
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero-bubble")
CONTEXTS = ("gather", "exchange")
RECOMPUTES = ("none", "full", "selective", 2)
MODELS = ("dense-tied", "dense-untied", "mixture-tied", "mixture-untied")


@dataclass(frozen=True, slots=True)
class Case:
    """A plan and the model to train under it."""

    plan: Plan
    model: str

    def __str__(self) -> str:
        mesh, plan = self.plan.mesh, self.plan
        parts = [str(mesh).replace(" x ", "-").replace(" ", "")]
        parts += [plan.sharding] if mesh.dp_shard > 1 else []
        parts += [plan.pipeline.schedule] if mesh.pp > 1 else []
        parts += [plan.comm.context] if mesh.cp > 1 else []
        parts += [f"accumulate-{plan.grad_accum}"] if plan.grad_accum > 1 else []
        parts += [f"recompute-{plan.recompute}"] if plan.recompute != "none" else []
        parts += [] if plan.comm.overlap else ["reduced-after"]
        parts += ["regather"] if plan.comm.regather else []
        return "-".join([*parts, self.model])


def cases() -> list[Case]:
    """Return every axis alone with each of its settings, then every combination at degree 2 on up to 8 ranks.

    Replicas that reduce gradients after backward, the plans of REGATHER, whose ranks gather inputs again in backward,
    the plans of ADAPTERS, which train adapters, and the plans of RING, with ring attention, follow.

    The combinations cycle through the settings, so that each setting occurs in many of them.
    """
    single = [axes for axes in axis_sets() if world_size(axes) == DEGREE]
    combined = [axes for axes in axis_sets() if DEGREE < world_size(axes) <= LARGEST_WORLD]
    cycles = {name: cycle(values) for name, values in SETTINGS.items()}
    # Shifted after each cycle, so that models and settings do not repeat together.
    models = (MODELS[(index + index // len(MODELS)) % len(MODELS)] for index in count())
    found = [case for axes in single for case in _every_setting(axes, models)]
    for axes in combined:
        settings = {name: next(cycles[name]) for name in settings_of(axes)}
        found.append(case_of(axes, next(models), recompute=next(cycles["recompute"]), **settings))
    found.append(case_of(("dp_replicate",), "dense-tied", grad_accum=2, overlap=False))
    found += [
        case_of(axes, model, **{"grad_accum": 2, "regather": True} | settings) for axes, model, settings in REGATHER
    ]
    return found + [
        case_of(axes, model, **{"grad_accum": 2} | settings) for axes, model, settings in (*ADAPTERS, *RING)
    ]


# The plans under which inputs are gathered again in backward.
REGATHER: tuple[tuple[tuple[str, ...], str, dict[str, Any]], ...] = (
    (("tp",), "dense-untied", {}),
    (("tp",), "mixture-tied", {}),
    (("tp",), "lora-tied", {}),
    (("dp_replicate", "tp"), "dense-tied", {"recompute": 2}),
    (("dp_shard", "tp"), "dense-untied", {"sharding": "parameters"}),
    (("dp_shard", "tp"), "mixture-untied", {"sharding": "gradients"}),
    (("dp_shard", "tp"), "dora-untied", {"sharding": "parameters"}),
    (("tp", "pp"), "dense-tied", {"schedule": "interleaved"}),
    (("tp", "pp"), "dense-untied", {"schedule": "zero-bubble"}),
    (("tp", "cp"), "dense-untied", {"context": "gather"}),
    (("dp_shard", "tp", "ep"), "mixture-tied", {"sharding": "parameters"}),
    (("dp_shard", "tp", "pp"), "dense-untied", {"sharding": "parameters"}),
)


# The plans under which adapters are compared: every axis alone, and products of some.
ADAPTERS: tuple[tuple[tuple[str, ...], str, dict[str, Any]], ...] = (
    (("dp_replicate",), "lora-tied", {}),
    (("dp_shard",), "lora-untied", {"sharding": "parameters"}),
    (("dp_shard",), "lora-tied", {"sharding": "gradients"}),
    (("dp_shard",), "dora-untied", {"sharding": "optimizer"}),
    (("tp",), "lora-tied", {}),
    (("tp",), "dora-untied", {}),
    (("pp",), "lora-tied", {"schedule": "1f1b"}),
    (("pp",), "lora-untied", {"schedule": "interleaved"}),
    (("pp",), "dora-tied", {"schedule": "zero-bubble"}),
    (("cp",), "lora-untied", {"context": "exchange"}),
    (("dp_replicate", "dp_shard"), "lora-tied", {"sharding": "parameters"}),
    (("dp_replicate", "tp"), "lora-untied", {"recompute": "full"}),
    (("dp_shard", "tp"), "lora-tied", {"sharding": "parameters"}),
    (("dp_shard", "tp"), "dora-untied", {"sharding": "gradients", "recompute": "selective"}),
    (("dp_replicate", "pp"), "lora-tied", {}),
    (("dp_shard", "pp"), "dora-untied", {"sharding": "parameters"}),
    (("tp", "pp"), "lora-tied", {"recompute": 2}),
    (("dp_shard", "tp", "pp"), "lora-untied", {"sharding": "optimizer"}),
)


# The plans with ring attention: alone at degrees 2 and 4, and with every other axis.
RING: tuple[tuple[tuple[str, ...], str, dict[str, Any]], ...] = tuple(
    (axes, model, {"context": "ring"} | settings)
    for axes, model, settings in (
        (("cp",), "dense-untied", {}),
        (("cp",), "lora-untied", {"recompute": "full"}),
        (("cp",), "dense-tied", {"cp": 4, "recompute": "selective"}),
        (("cp",), "mixture-tied", {"cp": 4}),
        (("dp_replicate", "cp"), "dense-tied", {"recompute": 2}),
        (("dp_shard", "cp"), "mixture-untied", {"sharding": "parameters", "recompute": "selective"}),
        (("tp", "cp"), "dense-untied", {"recompute": "full"}),
        (("pp", "cp"), "dense-tied", {"schedule": "zero-bubble"}),
        (("cp", "ep"), "mixture-tied", {}),
        (("dp_shard", "tp", "cp"), "dense-tied", {"sharding": "parameters"}),
        (("tp", "pp", "cp"), "mixture-untied", {"schedule": "interleaved"}),
        (("dp_shard", "pp", "cp"), "dense-untied", {"sharding": "optimizer"}),
    )
)


SETTINGS: dict[str, tuple[Any, ...]] = {
    "sharding": SHARDINGS,
    "schedule": SCHEDULES,
    "context": CONTEXTS,
    "recompute": RECOMPUTES,
    "grad_accum": (1, 2),
}


def has_adapter(case: Case) -> bool:
    return case.model.startswith(("lora", "dora"))


# Of experts with two other axes, `make test` trains these.
WITH_EXPERTS = (Mesh(dp_shard=2, tp=2, ep=2), Mesh(dp_shard=2, pp=2, ep=2))


def is_quick(case: Case) -> bool:
    """Return whether `make test` trains this case: every axis with each of its settings, and every pair of axes.

    Adapters are in `tests/dist/test_adapters.py`, and regather in `tests/dist/test_regather.py`.
    """
    mesh, plan = case.plan.mesh, case.plan
    if has_adapter(case) or plan.comm.regather or mesh.world_size > DEGREE**2:
        return False
    if mesh.world_size > DEGREE:
        return plan.comm.context != "ring" and (mesh.ep == 1 or mesh in WITH_EXPERTS)
    # The sharding and the context exchange do not affect experts.
    return mesh.ep == 1 or (plan.sharding in ("none", "parameters") and plan.comm.context == "gather")


def axis_sets() -> list[tuple[str, ...]]:
    """Return the legal combinations of axes. ep needs ranks with different tokens."""
    sets = [axes for size in range(1, len(AXES) + 1) for axes in combinations(AXES, size)]
    return [axes for axes in sets if "ep" not in axes or {"dp_replicate", "dp_shard", "cp"} & set(axes)]


def world_size(axes: tuple[str, ...]) -> int:
    return DEGREE ** len(set(axes) - {"ep"})


def settings_of(axes: tuple[str, ...]) -> list[str]:
    """Return the settings that apply to a combination of these axes."""
    wanted = {"sharding": "dp_shard" in axes, "schedule": "pp" in axes, "context": "cp" in axes}
    return [name for name, counts in wanted.items() if counts] + ([] if "pp" in axes else ["grad_accum"])


def _every_setting(axes: tuple[str, ...], models: Iterator[str]) -> Iterator[Case]:
    names = [name for name in settings_of(axes) if name != "grad_accum"]
    for values in product(*(SETTINGS[name] for name in names)):
        yield case_of(axes, next(models), grad_accum=2, **dict(zip(names, values, strict=True)))


def case_of(axes: tuple[str, ...], model: str, **settings: Any) -> Case:
    mesh = Mesh.model_validate(
        dict.fromkeys(axes, DEGREE) | {axis: settings[axis] for axis in axes if axis in settings}
    )
    schedule = settings.get("schedule", "1f1b")
    grad_accum = 4 if mesh.pp > 1 else settings.get("grad_accum", 1)  # a pipeline of four stages needs four
    plan = Plan.model_validate(
        {
            "mesh": mesh,
            "sharding": settings.get("sharding", "none"),
            "pipeline": {"schedule": schedule},
            # The planner refuses recompute with a split backward, which would recompute everything twice.
            "recompute": "none" if schedule == "zero-bubble" else settings.get("recompute", "none"),
            "comm": {
                "context": settings.get("context", "gather"),
                "overlap": settings.get("overlap", True),
                "regather": settings.get("regather", False),
            },
            "grad_accum": grad_accum,
            "micro_batch": GLOBAL_BATCH // (mesh.dp * grad_accum),
        }
    )
    return Case(plan, model.replace("dense", "mixture") if "ep" in axes else model)


def recipe_for(model: str, data: Path, **train: float) -> Recipe:
    kind, head = model.split("-")
    # The head is trained too: with a random one there is little to learn, and rounding would show.
    adapter = {"kind": kind, "rank": 8, "train": ["lm_head"]} if kind in ("lora", "dora") else None
    return Recipe.model_validate(
        {
            "model": {
                "preset": "tiny-moe" if kind == "mixture" else "tiny",
                "shape": SHAPE | {"tied": head == "tied"},
                "adapter": adapter,
            },
            "data": {"source": "jsonl", "path": str(data), "seq_len": 32, "isolate_documents": True},
            "train": {
                "steps": STEPS,
                "global_batch": GLOBAL_BATCH,
                "lr": 3e-3,
                "seed": 3,
                "evaluate": {"batches": 0},
                "sample": {"tokens": 0},
            }
            | train,
        }
    )


def write_documents(path: Path) -> None:
    """Write documents of very uneven length, so that every rank counts different valid tokens."""
    with path.open("w") as file:
        for number in range(900):
            file.write(json.dumps({"text": f"{number} " * (1 + number * number % 23)}) + "\n")


@lru_cache
def reference(model: str, workspace: Path, **train: float) -> Trajectory:
    """Return the trajectory of one process."""
    recipe = recipe_for(model, workspace / "uneven.jsonl", **train)
    return train_trajectory(recipe, Plan(micro_batch=GLOBAL_BATCH), workspace / "runs")


def run(case: Case, workspace: Path, **train: float) -> Trajectory:
    return train_trajectory(recipe_for(case.model, workspace / "uneven.jsonl", **train), case.plan, workspace / "runs")


def parse_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    parser.add_argument("--write", type=Path, metavar="FILE", help="the page whose table to replace; runs all cases")
    parser.add_argument("--adapters", action="store_true", help="only cases with adapters")
    parser.add_argument("--rows", default="", metavar="TEXT", help="only cases whose name contains this")
    flags = parser.parse_args()
    if flags.write and (flags.adapters or flags.rows):
        parser.error("--write needs all cases")
    return flags


def is_chosen(case: Case, flags: argparse.Namespace) -> bool:
    return flags.rows in str(case) and (has_adapter(case) or not flags.adapters)


def main(flags: argparse.Namespace) -> None:
    rows = ["| plan | model | ranks | loss | gradient norm | weights |", "|---|---|---|---|---|---|"]
    print(*rows, sep="\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        workspace = Path(folder)
        (workspace / "runs").mkdir()
        write_documents(workspace / "uneven.jsonl")
        for case in [each for each in cases() if is_chosen(each, flags)]:
            began = time.monotonic()
            loss, norm, weights = differences(run(case, workspace), reference(case.model, workspace))
            name = str(case).removesuffix(f"-{case.model}")
            rows.append(
                f"| {name} | {case.model} | {case.plan.mesh.world_size} | {loss:.1e} | {norm:.1e} | {weights:.1e} |"
            )
            print(rows[-1], f"{time.monotonic() - began:.1f} s", flush=True)
    if flags.write:
        before, _, _ = flags.write.read_text().partition(rows[0])
        flags.write.write_text(before + "\n".join(rows) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(parse_flags())
