"""Text generation from a trained network."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trimaran.core import ModelSection, UserError
from trimaran.core.parse_text import TextError, load_json
from trimaran.core.regular_files import read_regular_bytes
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
    tokenizer = open_saved_tokenizer(run.model)
    network = load_trained(recipe.model, run.model)
    device = next(network.module.parameters()).device
    model = NextTokenModel(
        lambda ids: network.forward({"tokens": ids[None]})[0][0, -1].float().cpu(), network.max_seq_len, device
    )
    network.module.eval()
    return generate_text(model, tokenizer, prompt, tokens=tokens, temperature=temperature, seed=seed)


def open_saved_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer that `save_tokenizer` wrote to the folder of a trained model."""
    file = folder / TOKENIZER
    fix = "train the run again, or export a checkpoint of it: `trimaran export RUN`"
    try:
        description = load_json(read_regular_bytes(file))
    except OSError as error:
        raise UserError("T011", f"the tokenizer cannot be read: {error.strerror}", where=str(file), fix=fix) from None
    except TextError as error:
        raise UserError("T011", f"the tokenizer's description is not JSON: {error.what}", where=str(file), fix=fix
                        ) from None  # fmt: skip
    if not isinstance(description, dict):
        raise UserError("T011", "the tokenizer's description has no fields", where=str(file), fix=fix)
    return open_tokenizer(description, folder)


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
    ids = prompt_ids(tokenizer, prompt, model.device)
    return tokenizer.decode(generate_ids(model, ids, tokens=tokens, temperature=temperature, seed=seed).tolist())


def prompt_ids(tokenizer: Tokenizer, prompt: str, device: torch.device) -> Tensor:
    """Return the token ids of `prompt`; the end-of-document token if it is empty."""
    return torch.tensor(tokenizer.encode(prompt).tolist() or [tokenizer.end_id], device=device)


def save_tokenizer(tokenizer: Tokenizer | None, folder: Path) -> None:
    """Write the tokenizer, if there is one, beside the weights, so that the folder is enough to generate text."""
    if tokenizer is None:
        return
    tokenizer.save(folder)
    (folder / TOKENIZER).write_text(json.dumps(tokenizer.describe()) + "\n", encoding="utf-8")


@torch.no_grad()
@torch.compiler.set_stance("force_eager")  # every token makes the sequence longer: a new shape, a new compilation
def generate_ids(
    model: NextTokenModel,
    prompt: Tensor,
    *,
    tokens: int,
    temperature: float,
    seed: int,
    allows_next: Callable[[], bool] | None = None,
) -> Tensor:
    """Return the ids of `prompt` ([length]) followed by `tokens` generated ones; temperature 0 is greedy decoding.

    After each token but the last, `allows_next` says whether to generate another, the same on every rank.

    Tokens are sampled with a separate CPU generator, so that every rank of a sharded network samples the same token.
    When the text is longer than `max_length`, only its last `max_length` ids go into the network.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = prompt
    for number in range(tokens):
        if number and allows_next is not None and not allows_next():
            break
        logits = model.logits(ids[-model.max_length :])
        ids = torch.cat([ids, _next_token(logits, temperature, generator).to(ids.device)])
    return ids


def _next_token(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """Return one id [1], sampled; the likeliest if the temperature is 0 or too close to it for a float."""
    if torch.isnan(logits).any():
        raise UserError("M022", "the network computes NaN instead of a next token", where="the trained weights",
                        fix="the run has diverged or the weights are damaged: generate from another checkpoint, see "
                        "`trimaran export RUN --step N`")  # fmt: skip
    if temperature:
        probabilities = torch.softmax(logits / temperature, dim=-1)
        if not torch.isnan(probabilities).any():
            return torch.multinomial(probabilities, 1, generator=generator)
    return logits.argmax(keepdim=True)
