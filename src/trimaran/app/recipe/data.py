"""`trimaran data`: inspect a recipe's data, pack text into token shards, and describe shards."""

import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
import yaml
from pydantic import ValidationError

from trimaran.app.recipe.options import Json, RecipeFile, Settings
from trimaran.app.show.clean_console import open_console, progress_bar
from trimaran.core import DataSection, UserError, show_bytes, show_count
from trimaran.data import TokenShards, cache_folder, pack, prepare
from trimaran.machine import first_error

data = typer.Typer(help="Inspect the data of a recipe; pack text into token shards.", rich_markup_mode=None)

Source = Literal["text", "jsonl", "datasets", "python-stdlib", "megatron", "nanogpt"]


@data.command("pack")
def pack_data(
    source: Annotated[Source, typer.Option(help="The format of the data.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="A new folder for the shards.")],
    path: Annotated[str | None, typer.Option(metavar="FILE", help="The file or folder to read.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="PATH", help="A model folder or a tokenizers JSON file. [default: bytes]")
    ] = None,
    text_field: Annotated[
        str, typer.Option(metavar="FIELD", help="The field of a JSONL line or row that holds the text.")
    ] = "text",
    end_token: Annotated[
        str | None, typer.Option(metavar="TOKEN", help="The end-of-document token, if it has no usual name.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Pack text into a folder of token shards, which runs can use without tokenizing again.

    \b
    trimaran data pack --source jsonl --path corpus.jsonl --out shards/corpus
    trimaran data pack --source text --path notes/ --tokenizer tokenizer.json --out shards/notes
    """
    try:
        section = DataSection(source=source, path=path, tokenizer=tokenizer, text_field=text_field)
    except ValidationError as error:
        raise first_error(error, DataSection, code="A001", where="`trimaran data pack`") from None
    with progress_bar(open_console(stderr=True)) as progress:
        pack(section, out, end_token=end_token, progress=progress)
    _show(TokenShards.open(out), as_json=as_json)


@data.command("info")
def show_info(
    path: Annotated[Path, typer.Argument(metavar="DIR", help="A folder of token shards.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read everything and compare the checksums.")] = False,
    as_json: Json = False,
) -> None:
    """Show what a folder of token shards contains, and how to use it in a recipe.

    \b
    trimaran data info shards/corpus --verify
    """
    shards = TokenShards.open(path)
    if verify:
        shards.verify()
    _show(shards, as_json=as_json, verified=verify)


@data.command("inspect")
def inspect_data(recipe: RecipeFile = None, settings: Settings = None, as_json: Json = False) -> None:
    """Prepare the data of a recipe and describe it: sources, lengths, images, bad samples, packing, one sample.

    The sample is shown as the model reads it, with what is learnt from in colour.

    \b
    trimaran data inspect recipes/vlm-tiny.yaml
    trimaran data inspect mine.yaml --set data.seq_len=2048 --json
    """
    from trimaran.app.recipe.inspect_data import describe, first_document, first_sample, show, show_sample
    from trimaran.app.recipe.prepare_data import sample_notices, text_notices
    from trimaran.app.recipe.recipe_files import with_local_files, with_local_model, with_model_tokenizer
    from trimaran.app.recipe.request import read_recipe
    from trimaran.data import SampleIndex, data_kind_of, prepare_samples

    asked = with_local_files(with_local_model(read_recipe(recipe, settings or [])), weights=False)
    asked = with_model_tokenizer(asked)
    kind = data_kind_of(asked)
    if kind == "scenes":
        raise UserError("T030.scenes-simulated-while", where="data.source: scenes")
    if kind == "text":
        with progress_bar(open_console(stderr=True)) as progress:
            shards = TokenShards.open(prepare(asked.data, cache=cache_folder(os.environ), progress=progress))
        notices, sample = text_notices(asked.data, shards), first_document(shards)
        _show(shards, as_json=as_json, more={"notices": notices, "bad": shards.bad, "sample": sample})
        if not as_json:
            show_sample(sample, open_console())
            for notice in notices:
                typer.echo(f"\nnotice      {notice}")
        return
    from trimaran.data.samples.tokenize_chat import choose_template
    from trimaran.models.resolve import recipe_image_rules

    rules = recipe_image_rules(asked)
    with progress_bar(open_console(stderr=True)) as progress:
        path = prepare_samples(asked.data, rules=rules, cache=cache_folder(os.environ), progress=progress)
    index = SampleIndex.open(path)
    template = choose_template(asked.data.samples.template, index.tokenizer)
    facts = describe(index, asked.data, rules, asked.train.seed)
    facts |= {"sample": first_sample(index, template), "notices": sample_notices(asked.data, index, rules)}
    if as_json:
        typer.echo(json.dumps(facts))
    else:
        show(facts, open_console())


def _show(shards: TokenShards, *, as_json: bool, verified: bool = False, more: dict[str, Any] | None = None) -> None:
    meta = shards.meta
    snippet = {"data": {"source": "shards", "path": str(shards.path.resolve())}}
    size = sum(file.stat().st_size for file in shards.path.iterdir())
    if as_json:
        facts: dict[str, Any] = meta.model_dump(mode="json") | {"path": str(shards.path), "bytes": size}
        typer.echo(json.dumps(facts | {"verified": verified, "recipe": snippet} | (more or {})))
        return
    kind = meta.tokenizer.get("kind", "unknown")
    typer.echo(f"tokens      {meta.num_tokens:,} ({show_count(meta.num_tokens)})")
    typer.echo(
        f"documents   {meta.num_documents:,}, {meta.num_tokens / meta.num_documents:,.0f} tokens each on average"
    )
    typer.echo(f"tokenizer   {kind}, {meta.vocab_size:,} ids")
    typer.echo(f"shards      {len(meta.shards)} x {meta.dtype}, {show_bytes(size)}{', verified' if verified else ''}")
    typer.echo(f"\nin a recipe:\n{yaml.safe_dump(snippet, sort_keys=False, default_flow_style=None).strip()}")
