"""Text generation from a trained network."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trimaran.core import ModelSection
from trimaran.data.tokenizer import Tokenizer, open_tokenizer
from trimaran.models import spec_of
from trimaran.nets import Network, network_of
from trimaran.run import RunDirectory

TOKENIZER = "trimaran-tokenizer.json"


@dataclass(frozen=True, slots=True)
class NextTokenModel:
    """Computes the logits of the token that follows at most `max_length` ids, which must be on `device`."""

    logits: Callable[[Tensor], Tensor]
    max_length: int
    device: torch.device


def generate_from_run(run: RunDirectory, prompt: str, *, tokens: int, temperature: float, seed: int) -> str:
    """Return `prompt` and its continuation by the network that `run` trained."""
    recipe = run.read_recipe()
    tokenizer = open_tokenizer(json.loads((run.model / TOKENIZER).read_text(encoding="utf-8")), run.model)
    network = load_trained(recipe.model, run.model)
    device = next(network.module.parameters()).device
    model = NextTokenModel(
        lambda ids: network.forward({"tokens": ids[None]})[0][0, -1].float().cpu(), network.max_seq_len, device
    )
    network.module.eval()
    return generate_text(model, tokenizer, prompt, tokens=tokens, temperature=temperature, seed=seed)


def load_trained(section: ModelSection, folder: Path) -> Network:
    """Return the unsharded network whose weights a run saved in `folder`, on this machine's first device."""
    if section.family == "hf":
        network = _load_hf(section, folder)
    else:
        spec = spec_of(ModelSection(family=section.family, path=str(folder)))
        assert spec is not None, "our own networks always have a spec"
        network = network_of(spec)
        network.load(folder)
    network.module.to("cuda" if torch.cuda.is_available() else "cpu")
    return network


def _load_hf(section: ModelSection, folder: Path) -> Network:
    from trimaran.nets.hf import load_hf_model  # noqa: PLC0415
    from trimaran.nets.hf_vlm import network_of_hf  # noqa: PLC0415

    module = load_hf_model(folder, trust_remote_code=section.trust_remote_code, seed=0)
    return network_of_hf(module, spec_of(section))


def generate_text(
    model: NextTokenModel, tokenizer: Tokenizer, prompt: str, *, tokens: int, temperature: float, seed: int
) -> str:
    """Return `prompt` and its continuation. An empty prompt starts from the end-of-document token."""
    start = tokenizer.encode(prompt).tolist() or [tokenizer.end_id]
    ids = torch.tensor(start, device=model.device)
    return tokenizer.decode(generate_ids(model, ids, tokens=tokens, temperature=temperature, seed=seed).tolist())


def save_tokenizer(tokenizer: Tokenizer | None, folder: Path) -> None:
    """Write the tokenizer, if there is one, beside the weights, so that the folder is enough to generate text."""
    if tokenizer is None:
        return
    tokenizer.save(folder)
    (folder / TOKENIZER).write_text(json.dumps(tokenizer.describe()) + "\n", encoding="utf-8")


@torch.no_grad()
@torch.compiler.set_stance("force_eager")  # every token makes the sequence longer: a new shape, a new compilation
def generate_ids(model: NextTokenModel, prompt: Tensor, *, tokens: int, temperature: float, seed: int) -> Tensor:
    """Return the ids of `prompt` ([length]) followed by `tokens` generated ones; temperature 0 is greedy decoding.

    Tokens are sampled with a separate CPU generator, so that every rank of a sharded network samples the same token.
    When the text is longer than `max_length`, only its last `max_length` ids go into the network.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = prompt
    for _ in range(tokens):
        logits = model.logits(ids[-model.max_length :])
        if temperature:
            token = torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=generator)
        else:
            token = logits.argmax(keepdim=True)
        ids = torch.cat([ids, token.to(ids.device)])
    return ids
