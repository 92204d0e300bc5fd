"""Names the files that a recipe leaves open: local folders for names on the Hub, and its model's own tokenizer."""

import os
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from trimaran.core import SOURCES, DataSection, MixtureSource, Recipe, UserError, expand_user
from trimaran.models import hub_repo_of, is_hub_name, language_of, model_folder, read_json, spec_of, weight_files
from trimaran.models.hub_files import fetch_dataset, fetch_model, fetch_small_files, restore_missing_files
from trimaran.models.hub_names import HubRepo

TEXT_SOURCES = ("text", "jsonl")
FILE_SOURCES = ("python-stdlib", "shapes", "scenes", "megatron", "nanogpt")  # a path is never a name on the Hub
MAX_CONFIG_BYTES = 10_000_000


def with_local_model(recipe: Recipe, *, only_config: bool = False) -> Recipe:
    """Return the recipe with a local folder instead of a model's name: its config and tokenizer, or only its config."""
    model = recipe.model
    if model.path and hub_repo_of(model.path) and not Path(model.path).exists():
        restore_missing_files(recipe)  # the recipe of a run whose cache was deleted
    if not model.path or not is_hub_name(model.path):
        return recipe
    repo = HubRepo(kind="model", name=model.path, revision=model.revision)
    folder = fetch_small_files(repo, only_config=only_config, code=model.trust_remote_code)
    located = model.model_copy(update={"path": str(folder), "revision": folder.name})
    return recipe.model_copy(update={"model": located})


def has_hub_data(recipe: Recipe) -> bool:
    """Return whether the recipe names a dataset on the Hub. Raises if its source only reads files."""
    return any(_is_on_hub(section) for section in (recipe.data, *recipe.data.mixture))


def with_local_files(recipe: Recipe, *, weights: bool = True) -> Recipe:
    """Return the recipe with local folders for its datasets, and fetch the weights of a model from the Hub."""
    repo = hub_repo_of(recipe.model.path) if recipe.model.path else None
    if weights and repo and recipe.model.revision:
        from trimaran.app.show.clean_console import open_console, print_plain, progress_bar

        name, commit = repo
        console, code = open_console(stderr=True), recipe.model.trust_remote_code
        with progress_bar(console) as progress:
            show = partial(progress, f"fetching {name}")
            folder = fetch_model(HubRepo(kind="model", name=name, revision=commit), show, code=code)
        print_plain(console, f"model {name}, commit {folder.name}")
    data = _local_source(recipe.data)
    mixture = tuple(_local_source(source) for source in recipe.data.mixture)
    if data is recipe.data and mixture == recipe.data.mixture:
        return recipe
    return recipe.model_copy(update={"data": data.model_copy(update={"mixture": mixture})})


Section = TypeVar("Section", DataSection, MixtureSource)


def _is_on_hub(section: DataSection | MixtureSource) -> bool:
    if not section.path or not is_hub_name(section.path) or section.source in FILE_SOURCES:
        return False
    if section.source not in SOURCES:  # a plug-in reads what it is given
        return False
    if section.source in TEXT_SOURCES:
        raise UserError("T064.dataset-hub-source", where="data.source", section=section.path, source=section.source)
    return True


def _local_source(section: Section) -> Section:
    """Return the section with the folder of a dataset's split. Conversations are then read as Parquet."""
    if not _is_on_hub(section):
        return section
    assert section.path is not None, "it names a dataset"
    from trimaran.app.show.clean_console import open_console, print_plain
    from trimaran.data import cache_folder

    repo = HubRepo(kind="dataset", name=section.path, revision=section.revision)
    console = open_console(stderr=True)
    with console.status(f"fetching {repo.name}"):
        folder = fetch_dataset(repo, cache_folder(os.environ), subset=section.subset, split=section.split)
    print_plain(console, f"dataset {repo.name}, split {section.split}, commit {folder.parts[-3]}")
    source = "datasets" if section.source == "datasets" else "parquet"
    fields: dict[str, Any] = {"path": str(folder), "revision": folder.parts[-3], "source": source}
    return section.model_copy(update=fields)


def with_model_tokenizer(recipe: Recipe) -> Recipe:
    """Return the recipe with the tokenizer and the chat template that its model has, where it names none.

    A run directory records them, so an older run, which trained on bytes in this case, resumes as it began. Raises
    if a model with weights has no tokenizer: on bytes it would learn to read again.
    """
    data = recipe.data
    if data.source == "scenes" or recipe.model.kind.reads == "scenes":
        return recipe
    if data.source == "shards" and not data.mixture:
        _refuse_other_shards(recipe)
        return recipe
    changes: dict[str, Any] = {}
    if data.tokenizer is None and recipe.model.path is not None:
        changes["tokenizer"] = _own_tokenizer(recipe)
    elif data.tokenizer is not None and data.tokenizer != "bytes":
        named = expand_user(data.tokenizer)
        if named.name == "tokenizer.json" and (named.parent / "tokenizer_config.json").is_file():
            changes["tokenizer"] = str(named.parent.absolute())  # the model's folder
        elif named.exists():
            changes["tokenizer"] = str(named)
    tokenizer = changes.get("tokenizer", data.tokenizer)
    if data.samples.template == "auto" and tokenizer is not None and Path(tokenizer).is_dir():
        from trimaran.data.text.tokenizer import chat_template_names

        if chat_template_names(Path(tokenizer)):
            changes["samples"] = data.samples.model_copy(update={"template": "model"})
    changed = {name: value for name, value in changes.items() if value != getattr(data, name)}
    return recipe.model_copy(update={"data": data.model_copy(update=changed)}) if changed else recipe


def model_vocabulary(recipe: Recipe) -> int | None:
    """Return how many token ids the recipe's model has; None if its config does not say."""
    spec = spec_of(recipe.model)
    if (language := language_of(spec)) is not None:
        return language.vocab
    if spec is not None or recipe.model.path is None:
        return None
    config = read_json(model_folder(recipe.model.path) / "config.json", limit_bytes=MAX_CONFIG_BYTES)
    text_config = config.get("text_config")
    for fields in (config, text_config if isinstance(text_config, dict) else {}):
        if isinstance(fields.get("vocab_size"), int):
            return fields["vocab_size"]
    return None


def _own_tokenizer(recipe: Recipe) -> str | None:
    """Return the model's folder as its tokenizer; None, for bytes, if it was trained on bytes, or has no weights."""
    from trimaran.data.text.tokenizer import has_tokenizer, read_record

    assert recipe.model.path is not None
    folder = model_folder(recipe.model.path)
    if has_tokenizer(folder):
        return str(folder.absolute())
    if weight_files(folder) and read_record(folder).get("kind") != "bytes":
        vocabulary = model_vocabulary(recipe)
        has = f"a vocabulary of {vocabulary:,} ids" if vocabulary else "a vocabulary of its own"
        raise UserError("T022.model-trained-weights", where=f"model.path {folder}", has=has)
    return None


def _refuse_other_shards(recipe: Recipe) -> None:
    """Raise if the shards were packed with another tokenizer than that of the model, and the recipe does not name it.

    Without tokenizer files in the model's folder only bytes are refused.
    """
    from trimaran.data import TokenShards, load_tokenizer, named_path
    from trimaran.data.text.tokenizer import has_tokenizer, is_same_tokenizer

    if recipe.data.tokenizer is not None or recipe.model.path is None:
        return
    shards, folder = TokenShards.open(named_path(recipe.data)), model_folder(recipe.model.path)
    if shards.tokenizer.describe()["kind"] == "bytes":
        own = _own_tokenizer(recipe)
    else:
        own = str(folder) if has_tokenizer(folder) else None
    if own is None or is_same_tokenizer(tokenizer := load_tokenizer(own), shards.tokenizer):
        return
    raise UserError(
        "T019.shards-packed",
        where=str(shards.path),
        vocab_size=shards.vocab_size,
        tokenizer_vocab_size=tokenizer.vocab_size,
        folder=folder,
    )
