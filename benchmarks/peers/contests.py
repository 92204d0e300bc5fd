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
    precision: str = "bf16"
    recompute: str = "none"
    adapter: Mapping[str, Any] = field(default_factory=dict)
    about: str = ""


def options(**fields: Any) -> dict[str, Any]:
    return {"options": fields}


LORA = {"rank": 16, "alpha": 32}
HF = options(family="hf")

CONTESTS: dict[str, Contest] = {
    "1b": Contest(
        shape="1b",
        reference="torchtitan",
        peers={"torchtitan": {}, "trimaran": {}, "loop": {}, "hf_trainer": {}, "lightning": {}},
    ),
    "3b": Contest(
        shape="3b",
        reference="torchtitan",
        peers={"torchtitan": {}, "trimaran": {}, "loop": {}, "hf_trainer": {}},
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
    "packed": Contest(
        shape="1b",
        reference="trimaran",
        peers={"trimaran": {}, "trimaran+packed": options(packed=True)},
        about="+packed: documents of 528 tokens on average, attention inside each, against full sequences",
    ),
}


def works(name: str, contest: Contest, asked: Mapping[str, Any]) -> dict[str, Work]:
    """Return the work of each peer, by name. `asked` overrides fields of the contest for all peers."""
    names = ("shape", "seq_len", "micro_batch", "precision", "recompute")
    shared: dict[str, Any] = {name: getattr(contest, name) for name in names} | {"adapter": dict(contest.adapter)}
    if asked.get("shape") == "tiny" and contest.shape == "vlm":
        asked = {**asked, "shape": "tiny-vlm"}
    return {
        peer: Work(contest=name, peer=peer, **(shared | dict(changes) | dict(asked)))
        for peer, changes in contest.peers.items()
    }
