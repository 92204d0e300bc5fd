"""Text from a trained network."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trimaran.data.tokenizer import Tokenizer, open_tokenizer
from trimaran.infer.load_trained import load_trained
from trimaran.run import RunDirectory

TOKENIZER = "trimaran-tokenizer.json"


@dataclass(frozen=True, slots=True)
class Voice:
    """What speaks: the scores of the next token after at most `longest` ids, which live on `device`."""

    scores: Callable[[Tensor], Tensor]
    longest: int
    device: torch.device


def generate_from_run(run: RunDirectory, prompt: str, *, tokens: int, temperature: float, seed: int) -> str:
    """Return `prompt` continued by the network that `run` has trained."""
    recipe = run.read_recipe()
    tokenizer = open_tokenizer(json.loads((run.model / TOKENIZER).read_text(encoding="utf-8")), run.model)
    network = load_trained(recipe.model, run.model)
    device = next(network.module.parameters()).device
    voice = Voice(lambda ids: network.forward({"tokens": ids[None]})[0][0, -1].float().cpu(), network.longest, device)
    network.module.eval()
    return write(voice, tokenizer, prompt, tokens=tokens, temperature=temperature, seed=seed)


def write(voice: Voice, tokenizer: Tokenizer, prompt: str, *, tokens: int, temperature: float, seed: int) -> str:
    """Return `prompt` continued; an empty one continues the end of a document, which starts the next."""
    start = tokenizer.encode(prompt).tolist() or [tokenizer.end_id]
    ids = torch.tensor(start, device=voice.device)
    return tokenizer.decode(generate(voice, ids, tokens=tokens, temperature=temperature, seed=seed).tolist())


def save_tokenizer(tokenizer: Tokenizer | None, folder: Path) -> None:
    """Put the tokenizer, if there is one, beside the weights, so that the folder can speak on its own."""
    if tokenizer is None:
        return
    tokenizer.save(folder)
    (folder / TOKENIZER).write_text(json.dumps(tokenizer.describe()) + "\n", encoding="utf-8")


@torch.no_grad()
@torch.compiler.set_stance("force_eager")  # every token makes the sequence longer: a new shape, a new compilation
def generate(voice: Voice, prompt: Tensor, *, tokens: int, temperature: float, seed: int) -> Tensor:
    """Return the ids of `prompt` ([length]) continued by `tokens` more; temperature 0 takes the likeliest.

    The draw comes from a generator of its own on the CPU, so every rank of a sharded network draws the same token.
    The window slides when the text outgrows the network's longest sequence.
    """
    draw = torch.Generator().manual_seed(seed)
    ids = prompt
    for _ in range(tokens):
        scores = voice.scores(ids[-voice.longest :])
        if temperature:
            token = torch.multinomial(torch.softmax(scores / temperature, dim=-1), 1, generator=draw)
        else:
            token = scores.argmax(keepdim=True)
        ids = torch.cat([ids, token.to(ids.device)])
    return ids
