"""What a model is: family, size, limits, weights, tokenizer, chat template."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trimaran.app.recipe.ask_hf_facts import ask_hf_facts
from trimaran.app.recipe.hub_files import with_local_model
from trimaran.core import ModelSection, Recipe, UserError, show_bytes, show_count
from trimaran.data.text.tokenizer import Tokenizer, chat_template_names, has_tokenizer, load_tokenizer
from trimaran.models import (
    hub_repo_of,
    is_hub_name,
    model_folder,
    outline_if_known,
    repo_name,
    spec_of,
    vision_of,
    weight_files,
)

Family = Literal["decoder", "vlm", "hf"]
OWN_FAMILIES: tuple[Family, ...] = ("vlm", "decoder")  # preferred, because they support every axis


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A model that a recipe can name. `named` is the person's spelling, `folder` its path on this machine.

    mixes_documents: the documents of a packed row would attend to each other.
    """

    named: str
    folder: Path
    family: Family
    name: str
    num_parameters: int | None
    max_seq_len: int
    has_weights: bool
    weight_bytes: int
    tokenizer: Tokenizer | None
    has_chat_template: bool
    takes_images: bool
    image_tokens: int
    mixes_documents: bool = False

    def describe(self) -> str:
        """Return one line for the person."""
        size = f"{show_count(self.num_parameters)} parameters" if self.num_parameters else "size unknown"
        if self.weight_bytes:
            weights = f"weights of {show_bytes(self.weight_bytes)}"
        else:
            weights = "weights on the Hub" if self.has_weights else "no weights: trained from scratch"
        tokenizer = f"tokenizer of {self.tokenizer.vocab_size:,} ids" if self.tokenizer else "no tokenizer: bytes"
        template = "its own chat template" if self.has_chat_template else "no chat template"
        limit = f"at most {self.max_seq_len:,} tokens" if self.max_seq_len else "no limit of length"
        return f"{self.name}, {size}, {weights}, {tokenizer}, {template}, {limit}"

    def as_dict(self) -> dict[str, Any]:
        return {
            "path": self.named,
            "family": self.family,
            "name": self.name,
            "num_parameters": self.num_parameters,
            "max_seq_len": self.max_seq_len,
            "has_weights": self.has_weights,
            "vocab_size": self.tokenizer.vocab_size if self.tokenizer else None,
            "has_chat_template": self.has_chat_template,
        }


def look_at_model(named: str) -> ModelFacts:
    """Return what is known of the model in a folder, or of a name on the Hub, whose config and tokenizer are fetched.

    Raises UserError if there is no such model, or if transformers' code for it is not that of a causal language model.
    """
    recipe = with_local_model(Recipe(model=ModelSection(family="hf", path=named)))
    assert recipe.model.path is not None
    folder = model_folder(recipe.model.path)
    family: Family = next((each for each in OWN_FAMILIES if _describes(each, folder)), "hf")
    section = ModelSection(family=family, path=str(folder))
    facts, _ = ask_hf_facts(section, os.environ)
    if facts is not None and facts.untrainable is not None:
        raise facts.untrainable
    outline = outline_if_known(section)
    files = weight_files(folder)
    projector = [tower.positions for tower in outline.towers if tower.name == "projector"] if outline else []
    takes_images = vision_of(spec_of(section)) is not None
    return ModelFacts(
        named=named,
        folder=folder,
        family=family,
        name=repo_name(folder),
        num_parameters=outline.num_parameters if outline else None,
        max_seq_len=outline.max_seq_len if outline else 0,
        has_weights=bool(files) or is_hub_name(named) or hub_repo_of(folder) is not None,
        weight_bytes=sum(file.stat().st_size for file in files),
        tokenizer=load_tokenizer(str(folder)) if has_tokenizer(folder) else None,
        has_chat_template=has_tokenizer(folder) and bool(chat_template_names(folder)),
        takes_images=takes_images,
        image_tokens=sum(projector) if takes_images else 0,
        mixes_documents=facts is not None and facts.without_documents is not None,
    )


def _describes(family: Family, folder: Path) -> bool:
    try:
        return spec_of(ModelSection(family=family, path=str(folder))) is not None
    except UserError:
        return False
