"""Which peers are compared on which work. A peer is the name of a trainer and, after a `+`, how it differs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.peers.work import Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """One kind of work. `peers` maps each peer to the fields that it changes; `extra` peers run only if named.

    The others are compared with `reference`, and also with `beside`, a peer of another contest.
    """

    shape: str
    peers: Mapping[str, Mapping[str, Any]]
    reference: str
    beside: tuple[str, str] | None = None
    extra: tuple[str, ...] = ()
    seq_len: int = 4096
    micro_batch: int = 4
    grad_accum: int = 1
    ranks: int = 1
    precision: str = "bf16"
    recompute: str = "none"
    compile: bool = True
    adapter: Mapping[str, Any] = field(default_factory=dict)
    about: str = ""
    together: bool = False  # all peers are in memory at once and alternate window by window
    timing: Mapping[str, int] = field(default_factory=dict)  # `warm`, `settle`, `windows` and `steps`, if not the usual


def options(**fields: Any) -> dict[str, Any]:
    return {"options": fields}


LORA = {"rank": 16, "alpha": 32}
HF = options(family="hf")
LIGER = options(liger=True)
COPIES = options(copies=True)
COPIES_HF = options(copies=True, family="hf")
# Memory copies are periodic, so Trimaran's windows are longer. Its CUDA graphs are captured in the untimed steps.
LONG = {"steps": 50}
ONE_RUN = {"windows": 1, "steps": 200}
# torchtitan 0.3 captures CUDA graphs by default and has other attention kernels.
TITAN: dict[str, Mapping[str, Any]] = {
    "torchtitan": {},
    "torchtitan+no-graphs": options(graphs=False),
    "torchtitan+flex": options(attention="flex_flash"),
}
TITAN_EXTRA = ("torchtitan+no-graphs", "torchtitan+flex")


def small(shape: str, **changes: Any) -> Contest:
    """Return a contest of a small model. Every peer is compiled; Trimaran makes memory copies and writes telemetry."""
    timing = {"warm": 20, "settle": 3, "windows": 4, "steps": 20} | changes.pop("timing", {})
    is_short = timing["steps"] < LONG["steps"] // 2 and "grad_accum" in changes
    long = {} if is_short else LONG
    peers: dict[str, Mapping[str, Any]] = {
        "loop+plain": {},
        "trimaran": COPIES | long,
        "hf_trainer": {},
        "lightning": {},
        "loop": {},
        "trimaran+hf": COPIES_HF,
        "trimaran+run": options() | ONE_RUN,
        "trimaran+no-copies": long,
        "hf_trainer+liger": LIGER,
        **TITAN,
    }
    fields: dict[str, Any] = {"seq_len": 1024, "micro_batch": 16, "together": True, "timing": timing}
    extra = ("trimaran+run", "trimaran+no-copies", "hf_trainer+liger", *TITAN)
    return Contest(shape=shape, reference="loop+plain", peers=peers, extra=extra, **(fields | changes))


def eager(shape: str) -> Contest:
    """Return a contest without compilation."""
    return Contest(
        shape=shape,
        reference="loop+eager",
        seq_len=1024,
        micro_batch=16,
        compile=False,
        peers={"loop+eager": {}, "trimaran+eager": COPIES | LONG, "loop+blocks": {}},
        extra=("loop+blocks",),
        together=True,
        timing={"warm": 20, "settle": 3, "windows": 4, "steps": 20},
    )


def on_cpu(ranks: int) -> Contest:
    """Return a contest for CPUs. A window of `trimaran+run` is a run of its own."""
    return Contest(
        shape="cpu",
        reference="loop+plain",
        seq_len=64,
        micro_batch=4,
        ranks=ranks,
        precision="fp32",
        compile=False,
        peers={"loop+plain": {}, "hf_trainer": {}, "lightning": {}, "trimaran+run": {}},
        together=True,
        timing={"warm": 5, "settle": 1, "windows": 5, "steps": 15},
        about="CPU, fp32, not compiled",
    )


SMALL_SHAPES = ("25m", "60m", "160m", "360m")
ACCUMULATION = {"grad_accum": 8, "timing": {"warm": 6, "settle": 1, "windows": 3, "steps": 4}}
LESS = {"windows": 3}
SMALL: dict[str, Contest] = {f"small-{shape}": small(shape) for shape in SMALL_SHAPES}
SMALL |= {f"small-{shape}-accum8": small(shape, **ACCUMULATION) for shape in SMALL_SHAPES}
SMALL |= {f"small-{shape}-512": small(shape, seq_len=512, micro_batch=32, timing=LESS) for shape in SMALL_SHAPES}
SMALL |= {f"small-{shape}-2048": small(shape, seq_len=2048, micro_batch=8, timing=LESS) for shape in SMALL_SHAPES}
SMALL |= {f"eager-{shape}": eager(shape) for shape in SMALL_SHAPES}
SMALL |= {"cpu-1": on_cpu(1), "cpu-2": on_cpu(2)}

CONTESTS: dict[str, Contest] = {
    "1b": Contest(
        shape="1b",
        reference="torchtitan",
        peers={**TITAN, "trimaran": {}, "loop": {}, "hf_trainer": {}, "lightning": {}, "hf_trainer+liger": LIGER},
        extra=(*TITAN_EXTRA, "hf_trainer+liger"),
    ),
    "3b": Contest(
        shape="3b",
        reference="torchtitan",
        peers={**TITAN, "trimaran": {}, "loop": {}, "hf_trainer": {}},
        extra=TITAN_EXTRA,
    ),
    "3b-fp8": Contest(
        shape="3b",
        reference="torchtitan",
        beside=("3b", "torchtitan"),
        precision="fp8",
        peers={
            "torchtitan": {},
            "trimaran": {},
            "loop": {},
            "torchtitan+auto": options(filter=["output", "auto_filter_small_kn"]),
        },
        extra=("torchtitan+auto",),
        about="tensorwise scales, the head in bf16; +auto also leaves out layers that torchao considers too small",
    ),
    "8b": Contest(
        shape="8b",
        reference="torchtitan",
        micro_batch=1,
        recompute="full",
        peers={
            "torchtitan": {},
            "trimaran": options(planned=True),
            "loop": {},
            "torchtitan+selective": {"recompute": "selective"},
        },
        about="full recompute; +selective: torchtitan's per-operator recompute; trimaran's planner chooses its own",
    ),
    "hf-1b": Contest(
        shape="1b",
        reference="hf_trainer",
        peers={"hf_trainer": {}, "trimaran": options(family="hf")},
        about="transformers' LlamaForCausalLM in both trainers",
    ),
    "vlm": Contest(
        shape="vlm",
        reference="hf_trainer",
        seq_len=2048,
        peers={
            "hf_trainer": {},
            "trimaran": options(family="hf"),
            "trimaran+own": options(family="vlm"),
        },
        extra=("trimaran+own",),
        about="transformers' Qwen2-VL of 2B, an image of 448 x 448 in each row; +own: Trimaran's equivalent network",
    ),
    "8b-lora": Contest(
        shape="8b",
        reference="hf_trainer",
        seq_len=2048,
        adapter=LORA,
        peers={"hf_trainer": {}, "hf_trainer+eager": {"compile": False}, "trimaran": {}, "trimaran+hf": HF},
        about="LoRA of rank 16 on every linear layer, base weights in bf16; HF Trainer with peft",
    ),
    "8b-qlora": Contest(
        shape="8b",
        reference="hf_trainer",
        seq_len=2048,
        adapter=LORA | {"base": "4bit"},
        peers={"hf_trainer": {}, "hf_trainer+eager": {"compile": False}, "trimaran": {}, "trimaran+hf": HF},
        about="the same with the base in NF4, blocks of 64; HF Trainer with peft and bitsandbytes",
    ),
    "32k": Contest(
        shape="1b",
        reference="torchtitan",
        seq_len=32768,
        micro_batch=1,
        recompute="full",
        peers={"torchtitan": {}, "trimaran": {}},
    ),
    "moe": Contest(
        shape="moe",
        reference="hf_trainer",
        peers={
            "hf_trainer": {},
            "hf_trainer+eager": {"compile": False},
            "torchtitan": options(graphs=False),
            "trimaran": {},
            "trimaran+hf": HF,
        },
        extra=("hf_trainer+eager", "trimaran+hf"),
        about="transformers' Qwen3-MoE: 8 experts, 2 of them for a token, no balance loss; torchtitan's without graphs,"
        " which its default dispatch of tokens does not allow",
    ),
    "moe-64": Contest(
        shape="moe-64",
        reference="torchtitan",
        peers={
            "torchtitan": options(graphs=False),
            "trimaran": {},
            "hf_loop": {},
            "hf_loop+eager": {"compile": False},
            "hf_trainer": {},
        },
        extra=("hf_trainer",),
        about="Qwen3-MoE with 64 experts of 768, 8 of them for a token, no balance loss; torchtitan's without graphs;"
        " hf_loop: transformers' model in a plain loop with its grouped matmul",
    ),
    "packed": Contest(
        shape="1b",
        reference="trimaran",
        peers={"trimaran": {}, "trimaran+packed": options(packed=True)},
        about="+packed: documents of 528 tokens on average, attention inside each, against full sequences",
    ),
} | SMALL


def works(name: str, contest: Contest, asked: Mapping[str, Any]) -> dict[str, Work]:
    """Return the work of each peer, by name. `asked` overrides fields of the contest for all peers."""
    names = ("shape", "seq_len", "micro_batch", "grad_accum", "ranks", "precision", "recompute", "compile")
    shared: dict[str, Any] = {name: getattr(contest, name) for name in names} | {"adapter": dict(contest.adapter)}
    shared |= contest.timing
    if asked.get("shape") == "tiny" and contest.shape in ("vlm", "moe", "moe-64"):
        asked = {**asked, "shape": f"tiny-{contest.shape.partition('-')[0]}"}
    return {
        peer: Work(contest=name, peer=peer, **(shared | dict(changes) | dict(asked)))
        for peer, changes in contest.peers.items()
    }
