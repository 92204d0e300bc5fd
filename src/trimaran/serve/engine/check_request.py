"""Refuses requests that can never run."""

from trimaran.core import UserError
from trimaran.serve.engine.engine_request import EngineRequest
from trimaran.serve.engine.model_runner import RunnerTraits


def refuse_impossible(
    request: EngineRequest,
    traits: RunnerTraits,
    *,
    vocabulary: int,
    max_length: int,
    max_image_tokens: int,
    has_constraints: bool,
) -> None:
    """Raise UserError if the request can never run on this model and cache."""
    tokens = (*request.prompt, *request.generated)
    if not request.prompt or request.max_tokens < 0 or (request.logprobs or 0) < 0:
        raise UserError("E002", "a request needs at least one token, and no negative numbers", where="the prompt",
                        fix="send a prompt; an empty text is the end-of-text token")  # fmt: skip
    if len(tokens) > max_length:
        raise UserError("E003", f"the prompt has {len(tokens)} tokens, and there is room for {max_length}",
                        where="the prompt",
                        fix="shorten it, or serve with a larger cache if the model has more positions")  # fmt: skip
    if min(tokens) < 0 or max(tokens) >= vocabulary:
        wrong = min(tokens) if min(tokens) < 0 else max(tokens)
        raise UserError("E004", f"the model has no token {wrong}", where="the prompt",
                        fix=f"send ids from 0 to {vocabulary - 1}")  # fmt: skip
    if request.adapter is not None and request.adapter not in traits.adapters:
        raise UserError("E005", f"no adapter is called {request.adapter!r}", where="model",
                        fix=f"loaded are: {', '.join(traits.adapters) or 'none'}")  # fmt: skip
    _refuse_images(request, traits, max_image_tokens)
    if request.embed and not traits.embeds:
        raise UserError("E007", "this model returns no embeddings", where="the request",
                        fix="use a model whose attention can be paged; the log says why this one's cannot")  # fmt: skip
    if request.grammar is not None and not has_constraints:
        raise UserError("E008", "answers that follow a schema need a package that is not installed",
                        where="the request", fix="install it, or leave the schema out")  # fmt: skip


def _refuse_images(request: EngineRequest, traits: RunnerTraits, max_image_tokens: int) -> None:
    sizes = [image.stop - image.first for image in request.images]
    if sizes and max(sizes) > max_image_tokens:
        raise UserError("E006", f"an image has {max(sizes)} tokens, and a step has room for {max_image_tokens}",
                        where="the image", fix="send a smaller image, or raise max_step_tokens")  # fmt: skip
    expected = 0 if traits.image_token is None else request.prompt.count(traits.image_token)
    if expected != sum(sizes):
        raise UserError("E006", f"the prompt has {expected} image tokens, and its images have {sum(sizes)}",
                        where="the prompt",
                        fix="leave image tokens out of the text: an image brings its own")  # fmt: skip
