"""Refuses Hugging Face models that are no causal language models, and names what they are."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trimaran.core import UserError
from trimaran.models import vlm_from_disk
from trimaran.nets.hf.hf_attention import transformers
from trimaran.nets.hf_weights import without_head

ENCODER_DECODER, MASKED = "an encoder-decoder model", "a masked language model"
AUDIO, VISION = "an audio-language model", "a vision-language model"
# Kinds of models, by transformers' table of their classes. The first table that has a model counts.
KINDS = {
    "IMAGE_TEXT_TO_TEXT": VISION,
    "SPEECH_SEQ_2_SEQ": "a speech-to-text model",
    "SEQ_TO_SEQ_CAUSAL_LM": ENCODER_DECODER,
    "MASKED_LM": MASKED,
    "SEQUENCE_CLASSIFICATION": "a classifier of sequences",
    "TOKEN_CLASSIFICATION": "a classifier of tokens",
    "QUESTION_ANSWERING": "a model that finds answers in a text",
    "MULTIPLE_CHOICE": "a multiple-choice model",
    "NEXT_SENTENCE_PREDICTION": "a model of pairs of sentences",
    "ZERO_SHOT_IMAGE_CLASSIFICATION": "a model that compares images with texts",
    "IMAGE_CLASSIFICATION": "an image classifier",
    "OBJECT_DETECTION": "an object detector",
    "CTC": "a speech recogniser",
    "AUDIO_CLASSIFICATION": "an audio classifier",
}
BIDIRECTIONAL = frozenset({"cpmant", "xlnet"})  # they attend to later tokens unless each call forbids it
OWN_LOOP = "train it in your own loop with trimaran.prepare"


def refuse_other_kind(config: Any, loader: Any, path: Path) -> None:
    """Raise unless `loader`, an auto class of transformers, builds the kind of model that the folder holds."""
    if loader.__name__ in (getattr(config, "auto_map", None) or {}):
        return
    built = loader._model_mapping[type(config)].__name__ if type(config) in loader._model_mapping else ""
    saved = next(iter(getattr(config, "architectures", None) or ()), "")
    if built and built == saved:
        return
    kind = _kind_of(config, saved) if built else _kind_of(config, saved) or _kind_of(config, config.model_type)
    has_language_model = kind in ("", VISION, AUDIO) or (kind == MASKED and getattr(config, "is_decoder", False))
    if built and has_language_model:
        return
    # How a model of this kind can be trained.
    if kind == VISION and not vlm_difference(config):
        fix = "set model.family to vlm"
    elif kind == MASKED and built:
        fix = f"{OWN_LOOP}, or set is_decoder: true in config.json to train it as a decoder"
    elif built and getattr(config, "is_encoder_decoder", False):
        fix = f"{OWN_LOOP}, or save its decoder alone as {built}"
    else:
        fix = f"{OWN_LOOP}, or name the language model that it was made from" if built else OWN_LOOP
    raise UserError(
        "M091.not-causal-language",
        where=str(path),
        fix=fix,
        saved=saved or config.model_type,
        kind=kind or "no model of language",
    )


def refuse_later_tokens(module: Any, architecture: str, *, is_noncausal: bool) -> None:
    """Raise if tokens attend to later ones: trained to predict the next token, the model would learn to copy it."""
    config = module.config
    is_masked = config.model_type in _table("MASKED_LM")
    if is_masked and getattr(config, "is_decoder", None) is False:
        reason, setting = "is_decoder is false", "is_decoder: true"
    elif getattr(config, "causal", None) is False:  # XLM
        reason, setting = "causal is false", "causal: true"
    elif is_noncausal or config.model_type in BIDIRECTIONAL:
        reason, setting = "that is how its code attends", ""
    else:
        return
    fix = f"{OWN_LOOP}, with the masks and labels that it was made for"
    if setting:
        fix = f"set {setting} in config.json to train it as a decoder, or {fix}"
    raise UserError("M092.tokens-attend-later", where="model.path", fix=fix, architecture=architecture, reason=reason)


def refuse_without_head(module: Any, found: Sequence[str], problem: str, path: Path) -> None:
    """Raise if the `problem` is that the folder, with the weights `found`, has no head of a language model."""
    head = module.get_output_embeddings()
    names = [name for name, part in module.named_modules() if part is head]
    lacks_head = any(problem == f"{name}.weight is not on disk" for name in names)
    # Or the folder has only weights of the model's base, and the problem is another weight.
    base = f"{module.base_model_prefix}."
    is_base = hasattr(module, module.base_model_prefix) and all(each.startswith(base) for each in found)
    if lacks_head or (is_base and problem.endswith(" is not on disk") and not problem.startswith(base)):
        raise without_head(problem, path)


def _kind_of(config: Any, name: str) -> str:
    """Return the kind of the model with this class or this `model_type`; empty if no table has it."""
    if hasattr(config, "audio_config") and not getattr(config, "is_encoder_decoder", False):
        return AUDIO
    for table, kind in KINDS.items():
        by_type = _table(table)
        if name in by_type or any(name in (each if isinstance(each, tuple) else [each]) for each in by_type.values()):
            return kind
    return ENCODER_DECODER if getattr(config, "is_encoder_decoder", False) else ""


def _table(name: str) -> Mapping[str, str | tuple[str, ...]]:
    return getattr(transformers.models.auto.modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES", {})


def vlm_difference(config: Any) -> str:
    """Return what the vlm family does not support in a configuration; empty if it supports all of it."""
    try:
        vlm_from_disk(config.to_dict(), where="config.json")
    except UserError as error:
        return error.what
    return ""
