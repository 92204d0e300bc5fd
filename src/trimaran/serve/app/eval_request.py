"""What `trimaran eval` was asked for: weights, and the data to evaluate them on."""

from dataclasses import dataclass
from typing import Literal, cast

from trimaran.core import DataSection, Recipe, UserError
from trimaran.core.regular_files import expand_user
from trimaran.serve.weights_location import TrainedWeights

Source = Literal["text", "jsonl", "shards", "datasets"]
DEFAULT_SEQ_LEN = 1024
SHARDS_META = "meta.json"
DATASET_FILES = ("dataset_info.json", "dataset_dict.json")
SUFFIXES: dict[str, Source] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "datasets", ".arrow": "datasets"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRequest:
    """Weights to evaluate. Without `data` it is the held-out data of their run. `batches` None: all of them."""

    weights: TrainedWeights
    data: str | None = None
    source: Source | None = None
    seq_len: int | None = None
    batches: int | None = None

    def recipe(self) -> Recipe | None:
        return self.weights.run.read_recipe() if self.weights.run else None

    def section(self, data: str) -> DataSection:
        """Return the data section of `--data`."""
        recipe = self.recipe()
        usual = recipe.data.seq_len if recipe else DEFAULT_SEQ_LEN
        return DataSection(source=self.source or guess_source(data), path=data, seq_len=max(2, self.seq_len or usual),
                           isolate_documents=recipe.data.isolate_documents if recipe else False,
                           text_field=recipe.data.text_field if recipe else "text")  # fmt: skip


def guess_source(data: str) -> Source:
    """Return the format of a file or folder by its name and files; text if nothing says otherwise."""
    path = expand_user(data)
    if not path.exists():
        raise UserError("A046", "there is no such file or folder", where=f"--data {data}",
                        fix="name a text file or folder, JSONL, packed shards or a dataset on this disk")  # fmt: skip
    if (path / SHARDS_META).is_file():
        return "shards"
    if any((path / name).is_file() for name in DATASET_FILES):
        return "datasets"
    name = path.name.removesuffix(".gz").removesuffix(".zst")
    found = next((kind for suffix, kind in SUFFIXES.items() if name.endswith(suffix)), None)
    return cast(Source, found or "text")
