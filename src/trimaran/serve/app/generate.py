"""`trimaran generate`: continues a text or talks, with a trained model."""

import json
import math
import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from trimaran.app import Json, TrainedModelName
from trimaran.core import UserError
from trimaran.runs import refuse_unusable
from trimaran.serve.app.trained_weights import find_weights

MAX_TOKENS = 65536
MAX_SEED = 2**63 - 1
DEFAULT_TEMPERATURE = 0.9


def generate(
    model: TrainedModelName,
    prompt: Annotated[
        str | None, typer.Option(help="The text to continue, or the question. [default: the run's own]")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Talk, with the model's chat template. Ends with /exit.")
    ] = False,
    system: Annotated[str, typer.Option(help="The system prompt of a chat.")] = "",
    image: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="An image, for a model that sees. Repeatable.")
    ] = None,
    step: Annotated[int | None, typer.Option(min=0, metavar="N", help="Use the checkpoint of this step.")] = None,
    tokens: Annotated[
        int, typer.Option("--tokens", "--max-tokens", min=1, max=MAX_TOKENS, help="How many tokens at most.")
    ] = 240,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="0 always picks the likeliest token. [default: 0.9]")
    ] = None,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Of the likeliest tokens with this probability.")
    ] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Of so many of the likeliest tokens; 0: of all.")] = 0,
    greedy: Annotated[bool, typer.Option("--greedy", help="The same as --temperature 0.")] = False,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="The same seed generates the same text.")] = 0,
    dtype: Annotated[
        Literal["auto", "fp32", "bf16"], typer.Option(help="auto: as trained on a GPU, fp32 on a CPU.")
    ] = "auto",
    as_json: Json = False,
) -> int:
    """Continue a text, or talk, with a trained model. The text appears as it is generated.

    Of a run, the newest weights are used: those it saved at its end, or a later checkpoint.

    \b
    trimaran generate runs/stdlib-tiny --prompt "class "
    trimaran generate runs/my-chat --chat
    trimaran generate runs/my-chat --chat --system "Be brief." --prompt "What is a trimaran?" --greedy
    trimaran generate runs/shapes-tiny --chat --image photo.jpg --prompt "What is this?"
    trimaran generate ./Qwen2.5-0.5B --prompt "The sea" --top-p 0.9 --seed 7 --json
    """
    if system and not chat:
        raise UserError("A001.text-continue", where="--system")
    if chat and as_json and prompt is None:
        raise UserError("A001.chat-terminal", where="--json")
    for option, value in (("--temperature", temperature or 0.0), ("--top-p", top_p)):
        if math.isnan(value):
            raise UserError("A001.not-number", where=option, option=option)
    weights = find_weights(model, step)
    text = prompt
    if prompt is None and not chat:
        if weights.run is None:
            raise UserError("A001.no-text-continue", where="--prompt")
        from trimaran.app.runs.run_prompt import prompt_of_run

        text = prompt_of_run(weights.run)
    refuse_unusable(os.environ)
    from trimaran.data import cache_folder
    from trimaran.serve.app.talk import show_whole, talk
    from trimaran.serve.conversation import Conversation, continuation
    from trimaran.serve.trained_model import open_trained
    from trimaran.train import Sampling, TokenSampler

    if greedy and temperature:
        raise UserError("A001.greedy-temperature", where="--temperature")
    heat = 0.0 if greedy else DEFAULT_TEMPERATURE if temperature is None else temperature
    sampling = Sampling(temperature=heat, top_k=top_k, top_p=top_p, seed=seed)
    trained, images = open_trained(weights, dtype, cache=cache_folder(os.environ)), image or []
    if chat and text is None:
        return talk(trained, sampling, system=system, images=images, max_tokens=tokens)
    shown, sampler = None if as_json else sys.stdout, TokenSampler(sampling)
    if chat:
        conversation = Conversation(trained, system=system)
        generation = conversation.ask(text or "", images, sampler, max_tokens=tokens)
    else:
        generation = continuation(trained, text or "", images, sampler, max_tokens=tokens)
        if shown is not None:
            shown.write(text or "")
            shown.flush()
    result = show_whole(generation, trained.tokenizer, shown)
    if as_json:  # `text` includes a prompt that was continued, and is the answer in a chat
        facts = {"run_dir": str(weights.run.path) if weights.run else None, "model": str(weights.path)}
        facts |= {"step": weights.step, "prompt": text or "", "text": result.text if chat else f"{text}{result.text}"}
        typer.echo(json.dumps(facts | {"completion": result.text} | result.numbers()))
    return result.exit_code
