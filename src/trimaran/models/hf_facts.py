"""What our trainer can do with a Hugging Face model: facts that only the model's code reveals, kept in a cache.

`train/find_hf_facts.py` finds them, by building the model without weights. The planner reads them without torch.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from trimaran.core import VERSION, ModelSection, UserError, read_regular_bytes, user_cache, write_atomically
from trimaran.models.section_spec import MAX_CONFIG_BYTES, model_folder

FORMAT = 4  # of the files in the cache; a change of what they hold needs another number
MAX_FACTS_BYTES = 1_000_000
PACKAGES = ("torch", "transformers")  # whose versions decide what a model can do


@dataclass(frozen=True, slots=True, kw_only=True)
class HfFacts:
    """What training refuses, as the mistakes that it raises, and the sizes that it checks.

    untrainable: why the model cannot be trained at all. without_tp and the like: why the axis is not possible.
    tp_sizes: what tp must divide, by name. num_layers: how many layers a pipeline splits. num_experts: of a layer with
    stacked experts, which ep splits; if layers differ, what divides all of them.
    without_documents: why the documents of a row are not kept apart, in rows longer than longest_packed_row.
    """

    untrainable: UserError | None = None
    without_tp: UserError | None = None
    without_cp: UserError | None = None
    without_pp: UserError | None = None
    without_ep: UserError | None = None
    without_documents: UserError | None = None
    longest_packed_row: int = 0
    tp_sizes: Mapping[str, int] = field(default_factory=dict)
    num_layers: int = 0
    num_experts: int = 0
    max_seq_len: int = 0  # the longest sequence; 0 if the model gives no limit
    has_fp8_layers: bool = False

    def as_dict(self) -> dict[str, Any]:
        mistakes = {name: error.as_dict() if (error := getattr(self, name)) else None for name in MISTAKES}
        sizes = {name: getattr(self, name) for name in SIZES}
        return {**mistakes, **sizes, "tp_sizes": dict(self.tp_sizes), "has_fp8_layers": self.has_fp8_layers}


MISTAKES = ("untrainable", "without_tp", "without_cp", "without_pp", "without_ep", "without_documents")
SIZES = ("num_layers", "num_experts", "max_seq_len", "longest_packed_row")


def facts_from_dict(tree: Mapping[str, Any]) -> HfFacts:
    """Return the facts in a file. Raises KeyError, TypeError or ValueError if it holds something else."""
    mistakes: dict[str, Any] = {name: None if tree[name] is None else UserError(**tree[name]) for name in MISTAKES}
    sizes: dict[str, Any] = {name: int(tree[name]) for name in SIZES}
    tp_sizes = {str(name): int(size) for name, size in tree["tp_sizes"].items()}
    return HfFacts(**mistakes, **sizes, tp_sizes=tp_sizes, has_fp8_layers=bool(tree["has_fp8_layers"]))


def refuse_tp_degree(degree: int, sizes: Mapping[str, int]) -> None:
    """Raise unless the degree divides every size that tp splits."""
    if bad := [f"{name} ({size})" for name, size in sizes.items() if size % degree]:
        works = [str(each) for each in range(1, degree) if not any(size % each for size in sizes.values())]
        raise UserError("M027.tp-not-divide", where="plan.mesh.tp", degree=degree, bad=bad[0], works=" or ".join(works))


def refuse_ep_degree(ep: int, tp: int, num_experts: int) -> None:
    """Raise unless the degrees divide the stacked experts: with both, tp splits the experts of each ep rank."""
    if ep > 1 and num_experts % (ep * tp):
        degrees = f"ep {ep}" if tp == 1 else f"ep {ep} x tp {tp}"
        raise UserError("P010.not-divide-experts", where="plan.mesh.ep", degrees=degrees, num_experts=num_experts)


def refuse_seq_len(seq_len: int, most: int) -> None:
    """Raise if the sequences are longer than the positions of a Hugging Face model without a spec."""
    if seq_len > most:
        raise UserError("P005.seq-len-model", where="data.seq_len", seq_len=seq_len, most=most)


def facts_file(section: ModelSection, environ: Mapping[str, str]) -> Path | None:
    """Return the cache's file for this model; None without a home directory, torch or transformers.

    Its name depends on config.json, the weights' files, trusted code, and the versions of the packages.
    """
    named, cache = environ.get("TRIMARAN_CACHE"), user_cache(environ)
    root = Path(named) if named else cache
    if section.path is None or root is None or missing_package():
        return None
    versions = {name: metadata.version(name) for name in PACKAGES}
    parts: dict[str, Any] = {"format": FORMAT, "trimaran": VERSION, **versions, "code": section.trust_remote_code}
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode())
    folder = model_folder(section.path)
    for path in [folder / "config.json", *(sorted(folder.glob("*.py")) if section.trust_remote_code else [])]:
        digest.update(path.name.encode() + read_regular_bytes(path, follow_links=True, limit_bytes=MAX_CONFIG_BYTES))
    for path in sorted(folder.glob("*.safetensors")):  # without a head, for instance, a model is refused
        about = path.stat()
        digest.update(f"{path.name} {about.st_size} {about.st_mtime_ns}".encode())
    return root / "hf-facts" / f"{digest.hexdigest()[:32]}.json"


def missing_package(packages: Sequence[str] = PACKAGES) -> str:
    """Return the first package that is not installed and that building a Hugging Face model needs; empty if none."""
    for name in packages:
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            return name
    return ""


def cached_facts(section: ModelSection, environ: Mapping[str, str]) -> HfFacts | None:
    """Return the facts of a Hugging Face model that an earlier command found; None if there are none."""
    try:
        if not section.kind.is_hf or (path := facts_file(section, environ)) is None:
            return None
        tree = json.loads(read_regular_bytes(path, follow_links=False, limit_bytes=MAX_FACTS_BYTES))
        facts = facts_from_dict(tree)
        if facts.untrainable is None or facts.untrainable.where == "model.path":
            return facts
        error = facts.untrainable
        return HfFacts(untrainable=UserError(error.code, error.what, where=str(section.path), fix=error.fix))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, UserError):
        return None  # a missing or damaged file is written again


def write_facts(path: Path, facts: HfFacts) -> None:
    """Write the file atomically: another planner that reads it meanwhile gets all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(facts.as_dict(), indent=2) + "\n", mode=0o644)
