"""The tokenizer of a GGUF file: its tokens, their kinds and merges, as llama.cpp reads them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from trimaran.data.text.token_bytes import byte_alphabet
from trimaran.data.text.tokenizer import TOKENIZER_FILE, ByteTokenizer, Tokenizer

# The regular expression of the pre-tokenizer, and llama.cpp's name for it. The one without a regular expression is the
# byte-level pre-tokenizer of GPT-2.
PRE_TOKENIZERS = {
    "": "gpt-2",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|"
    r"\s+": "llama-bpe",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+":
    "qwen2",
}  # fmt: skip
END = "<|endoftext|>"
# Never applied: these two bytes do not occur in UTF-8. llama.cpp requires a list of merges.
UNUSED_MERGE = "\u00fe \u00ff"


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTokenizer:
    """What a file says about its tokenizer. `left_out` is why it has none; '' if it has one.

    `kinds` are names of `gguf.TokenType`. `scores` are those of a SentencePiece tokenizer.
    """

    model: str = "none"
    pre: str = ""
    tokens: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    merges: tuple[str, ...] = ()
    scores: tuple[float, ...] = ()
    special_ids: Mapping[str, int] = field(default_factory=dict)
    begins: bool = False
    chat_template: str | None = None
    left_out: str = ""

    def write(self, writer: Any, gguf: Any) -> str:
        """Add the tokenizer to a `gguf.GGUFWriter`. Return `left_out`."""
        writer.add_tokenizer_model(self.model)
        if not self.tokens:
            return self.left_out
        if self.pre:
            writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(list(self.tokens))
        writer.add_token_types([getattr(gguf.TokenType, kind) for kind in self.kinds])
        if self.merges:
            writer.add_token_merges(list(self.merges))
        if self.scores:
            writer.add_token_scores(list(self.scores))
        for name, number in self.special_ids.items():
            getattr(writer, f"add_{name}_token_id")(number)
        writer.add_add_bos_token(self.begins)
        if self.chat_template:
            writer.add_chat_template(self.chat_template)
        return ""


def gguf_tokenizer(tokenizer: Tokenizer, vocab: int) -> GgufTokenizer:
    """Return the tokenizer for a file with `vocab` token ids. Ids that the tokenizer does not use are filled up."""
    if isinstance(tokenizer, ByteTokenizer):
        return _byte_tokenizer(vocab)
    with TemporaryDirectory() as folder:
        tokenizer.save(Path(folder))
        tree = json.loads((Path(folder) / TOKENIZER_FILE).read_text(encoding="utf-8"))
    model, pre = tree.get("model") or {}, _pre_tokenizer(tree)
    if model.get("type") != "BPE":
        return GgufTokenizer(left_out=f"llama.cpp has no tokenizer of the kind {model.get('type')}")
    is_sentencepiece = bool(model.get("byte_fallback"))
    if not is_sentencepiece and pre is None:
        return GgufTokenizer(left_out="llama.cpp does not know its pre-tokenizer")
    tokens, kinds = _tokens(tree, vocab)
    content = getattr(tokenizer, "content", None)
    templates = content.templates if content is not None else {}
    merges = (each if isinstance(each, str) else " ".join(each) for each in model.get("merges") or ())
    special_ids = {"eos": tokenizer.end_id}
    if tokenizer.begin_ids:
        special_ids["bos"] = tokenizer.begin_ids[0]
    return GgufTokenizer(
        model="llama" if is_sentencepiece else "gpt2",
        pre="default" if is_sentencepiece else pre or "",
        tokens=tokens,
        kinds=kinds,
        merges=() if is_sentencepiece else tuple(merges) or (UNUSED_MERGE,),
        # SentencePiece numbers the tokens of a BPE in the order of its merges, and scores them by it.
        scores=tuple(float(-number) for number in range(len(tokens))) if is_sentencepiece else (),
        special_ids=special_ids,
        begins=bool(tokenizer.begin_ids),
        chat_template=templates.get("default"),
    )


def _byte_tokenizer(vocab: int) -> GgufTokenizer:
    """Return bytes as a byte-level BPE without merges."""
    alphabet = byte_alphabet()
    tokens = [*(alphabet[byte] for byte in range(256)), END]
    kinds = ["NORMAL"] * 256 + ["CONTROL"]
    for number in range(len(tokens), vocab):
        tokens.append(f"[PAD{number}]")
        kinds.append("UNUSED")
    end = ByteTokenizer.end_id
    return GgufTokenizer(model="gpt2", pre="gpt-2", tokens=tuple(tokens[:vocab]), kinds=tuple(kinds[:vocab]),
                         merges=(UNUSED_MERGE,), special_ids={"eos": end} if end < vocab else {})  # fmt: skip


def _tokens(tree: Mapping[str, Any], vocab: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the token of each id below `vocab`, and its kind."""
    by_id = {number: token for token, number in tree["model"]["vocab"].items()}
    added = {each["id"]: each for each in tree.get("added_tokens") or ()}
    tokens, kinds = [], []
    for number in range(vocab):
        token = added[number]["content"] if number in added else by_id.get(number)
        if token is None:
            kind, token = "UNUSED", f"[PAD{number}]"
        elif number in added:
            kind = "CONTROL" if added[number].get("special") else "USER_DEFINED"
        elif len(token) == 6 and token.startswith("<0x"):
            kind = "BYTE"
        else:
            kind = "NORMAL"
        tokens.append(token)
        kinds.append(kind)
    return tuple(tokens), tuple(kinds)


def _pre_tokenizer(tree: Mapping[str, Any]) -> str | None:
    """Return llama.cpp's name of the pre-tokenizer; None if it has none."""
    top = tree.get("pre_tokenizer") or {}
    parts = top.get("pretokenizers") or [top]
    if not any(part.get("type") == "ByteLevel" for part in parts):
        return None
    pattern = ""
    for part in parts:
        if part.get("type") == "Split":
            pattern = (part.get("pattern") or {}).get("Regex") or (part.get("pattern") or {}).get("String") or "?"
        elif part.get("type") != "ByteLevel":
            return None
    return PRE_TOKENIZERS.get(pattern)
