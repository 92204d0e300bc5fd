"""Converts a tokenizer without tokenizer.json by the library transformers. Imported only if a model needs it."""

from pathlib import Path

from transformers import AutoTokenizer

from trimaran.data.text.tokenizer import unusable


def converted_tokenizer(folder: Path) -> bytes:
    """Return the content of a tokenizer.json for a folder that has only a vocabulary. No code of the model is run."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many types, and import errors of sentencepiece and tiktoken
        reason = str(error).strip().partition("\n")[0][:200] or type(error).__name__
        raise unusable(f"it has no tokenizer.json, and transformers cannot convert it: {reason}", folder) from None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise unusable("it has no tokenizer.json, and transformers knows no fast version of it", folder)
    return backend.to_str().encode()
