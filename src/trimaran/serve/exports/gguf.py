"""GGUF files for llama.cpp: weights, the shape of the model and its tokenizer."""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimaran.core import UserError
from trimaran.data import TOKENIZER_FILE, ByteTokenizer, Tokenizer, byte_alphabet
from trimaran.models import ModelSpec, Rope, spec_from_hf, spec_to_hf, unsupported, variations
from trimaran.nets import Decoder, Network, network_of
from trimaran.serve.exports.compare_logits import require_package

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
FILE = "model.gguf"
# The name of llama.cpp's architecture for each of transformers'.
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe"}
# llama.cpp finds no head in a file of these without one, and does not use the embedding instead.
WITH_OWN_HEAD = frozenset({"qwen2_moe"})
# What a file can hold, with the names of `gguf.GGMLQuantizationType` and `gguf.LlamaFileType`. The package quantises to
# no K-quants: llama.cpp's `llama-quantize` makes those of an f16 file.
TYPES = {
    "fp32": ("F32", "ALL_F32"),
    "fp16": ("F16", "MOSTLY_F16"),
    "bf16": ("BF16", "MOSTLY_BF16"),
    "q8_0": ("Q8_0", "MOSTLY_Q8_0"),
    "q5_1": ("Q5_1", "MOSTLY_Q5_1"),
    "q5_0": ("Q5_0", "MOSTLY_Q5_0"),
    "q4_1": ("Q4_1", "MOSTLY_Q4_1"),
    "q4_0": ("Q4_0", "MOSTLY_Q4_0"),
}
BLOCK = 32  # values that share a scale, in all quantised types above
EXPERT = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(\d+)\.(.*)")
EMBEDDINGS = ("token_embd.weight", "output.weight")
ROPE_FACTORS = "rope_freqs.weight"
WHERE = "--to gguf"


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTokenizer:
    """What a file says about its tokenizer. `left_out` is why it has none; '' if it has one."""

    model: str = "none"
    pre: str = ""
    tokens: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()  # names of `gguf.TokenType`
    merges: tuple[str, ...] = ()
    scores: tuple[float, ...] = ()  # of a SentencePiece tokenizer
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
        alphabet = byte_alphabet()
        tokens = [*(alphabet[byte] for byte in range(256)), END]
        kinds = ["NORMAL"] * 256 + ["CONTROL"]
        for number in range(len(tokens), vocab):
            tokens.append(f"[PAD{number}]")
            kinds.append("UNUSED")
        end = ByteTokenizer.end_id
        return GgufTokenizer(model="gpt2", pre="gpt-2", tokens=tuple(tokens[:vocab]), kinds=tuple(kinds[:vocab]),
                             merges=(UNUSED_MERGE,), special_ids={"eos": end} if end < vocab else {})  # fmt: skip
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


def _tokens(tree: Mapping[str, Any], vocab: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
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


def gguf_spec(network: Network) -> ModelSpec:
    """Return the shape to write; raise UserError if llama.cpp would compute something else with these weights."""
    config = network.disk_config()
    if config.get("model_type") == "mistral" and not config.get("sliding_window"):
        config = config | {"model_type": "llama"}  # the same network, and the same architecture in llama.cpp
    if reason := unsupported(config):
        raise UserError("K070.gguf-file-written", where=WHERE, architectures=", ".join(ARCHITECTURES), reason=reason)
    spec = spec_from_hf(config, where="the model")
    if spec.family not in ARCHITECTURES or variations(spec):
        what = ", ".join(variations(spec)) or f"the architecture {spec.family}"
        raise UserError("K070.gguf-file-written-model", where=WHERE, architectures=", ".join(ARCHITECTURES), text=what)
    kind, experts = spec_to_hf(spec)["model_type"], spec.block.experts
    if experts and experts.normalize_top_k != (kind == "qwen3_moe"):
        done = "does not normalise" if kind == "qwen2_moe" else "normalises"
        raise UserError("K070.llama-cpp-router", where=WHERE, done=done, kind=kind)
    if spec.block.rope.factor != 1 and kind != "llama":
        raise UserError("K070.llama-cpp", where=WHERE, kind=kind)
    return spec


def write_gguf(
    network: Network,
    tokenizer: Tokenizer,
    file: Path,
    *,
    name: str,
    kind: str,
    progress: Callable[[str, float], None] = lambda what, fraction: None,
) -> str:
    """Write `file` with weights of `kind`, a key of TYPES. Return why the tokenizer was left out, or ''."""
    gguf, spec = require_package("gguf", where=WHERE), gguf_spec(network)
    config = spec_to_hf(spec)
    writer = gguf.GGUFWriter(file, ARCHITECTURES[config["model_type"]])
    writer.add_name(name)
    writer.add_context_length(spec.max_seq_len)
    writer.add_embedding_length(spec.hidden)
    writer.add_block_count(spec.layers)
    writer.add_feed_forward_length(spec.ffn)
    writer.add_head_count(spec.heads)
    writer.add_head_count_kv(spec.kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_rope_dimension_count(spec.head_dim)
    writer.add_rope_freq_base(spec.block.rope.theta)
    writer.add_layer_norm_rms_eps(spec.block.norm_eps)
    writer.add_vocab_size(spec.vocab)
    if experts := spec.block.experts:
        writer.add_expert_count(experts.num_experts)
        writer.add_expert_used_count(experts.top_k)
        writer.add_expert_feed_forward_length(experts.ffn)
        if experts.shared_ffn:
            writer.add_expert_shared_feed_forward_length(experts.shared_ffn)
    writer.add_file_type(getattr(gguf.LlamaFileType, TYPES[kind][1]))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    left_out = gguf_tokenizer(tokenizer, spec.vocab).write(writer, gguf)
    names = gguf.get_tensor_name_map(_architecture(gguf, config["model_type"]), spec.layers)
    if spec.block.rope.factor != 1:
        writer.add_tensor(ROPE_FACTORS, rope_factors(spec.block.rope, spec.head_dim))
    done, total = 0, spec.num_parameters
    for tensor_name, tensor in _written_tensors(network.disk_tensors(), spec, config["model_type"]):
        written = _written_name(names, tensor_name)
        values = _permuted(tensor, tensor_name, spec).numpy() if config["model_type"] == "llama" else tensor.numpy()
        data, data_type = _encode(gguf, written, values, kind)
        writer.add_tensor(written, data, raw_dtype=data_type)
        done += tensor.numel()
        progress("encoding the weights", min(1.0, done / total))
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()
    return left_out


def _architecture(gguf: Any, model_type: str) -> Any:
    return next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == ARCHITECTURES[model_type])


def rope_factors(rope: Rope, head_dim: int) -> np.ndarray:
    """Return the factors that llama.cpp divides the rotary frequencies by, for positions scaled as in Llama 3.1."""
    frequencies = 1.0 / rope.theta ** (np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)
    turns = rope.original_max_seq_len * frequencies / (2 * math.pi)
    kept = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0, 1)
    return (1.0 / (kept + (1 - kept) / rope.factor)).astype(np.float32)


def _written_tensors(
    tensors: Iterable[tuple[str, Tensor]], spec: ModelSpec, model_type: str
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors as llama.cpp has them: experts of a layer stacked, the embedding again as a tied head."""
    count = spec.block.experts.num_experts if spec.block.experts else 0
    waiting: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors:
        if not (found := EXPERT.fullmatch(name)):
            yield name, tensor.float()
            if name == "model.embed_tokens.weight" and spec.tied and model_type in WITH_OWN_HEAD:
                yield "lm_head.weight", tensor.float()
            continue
        key = f"{found[1]}.{found[3]}"
        parts = waiting.setdefault(key, {})
        parts[int(found[2])] = tensor.float()
        if len(parts) == count:
            yield key, torch.stack([parts[number] for number in range(count)])
            del waiting[key]
    assert not waiting, f"experts are missing: {list(waiting)}"


def _written_name(names: Any, name: str) -> str:
    written = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert written is not None, f"the gguf package has no name for {name}"
    return written


def _permuted(tensor: Tensor, name: str, spec: ModelSpec, *, back: bool = False) -> Tensor:
    """Return a query or key projection of Llama with the order of features that llama.cpp's rotation expects.

    Hugging Face rotates features i and i + head_dim / 2; llama.cpp, as Meta, features 2 i and 2 i + 1.
    """
    heads = spec.heads if ".q_proj." in name else spec.kv_heads if ".k_proj." in name else 0
    if not heads:
        return tensor
    split = (heads, -1, 2) if back else (heads, 2, -1)
    return tensor.reshape(*split, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape).contiguous()


def _encode(gguf: Any, name: str, values: np.ndarray, kind: str) -> tuple[np.ndarray, Any]:
    """Return the bytes of a tensor and their type. Vectors and routers stay fp32."""
    chosen = TYPES[kind][0]
    if values.ndim == 1 or "ffn_gate_inp" in name:
        chosen = "F32"
    elif kind.startswith("q"):
        if values.shape[-1] % BLOCK:
            chosen = "F16"  # its rows are no multiple of a block
        elif name in EMBEDDINGS:
            chosen = "Q8_0"  # as llama.cpp does: what is lost there is lost for every layer
    data_type = getattr(gguf.GGMLQuantizationType, chosen)
    return gguf.quants.quantize(np.ascontiguousarray(values, dtype=np.float32), data_type), data_type


def read_gguf(file: Path, expected: ModelSpec) -> Network:
    """Return the network of a file. A file has rotary positions only as factors: they are those of `expected`.

    Raises UserError unless it scales rotary frequencies so. The metadata has no place for Llama 3.1's.
    """
    gguf, rope = require_package("gguf", where=WHERE), expected.block.rope
    reader = gguf.GGUFReader(file)
    found = {each.name: each for each in reader.tensors}
    factors, own = rope_factors(rope, expected.head_dim) if rope.factor != 1 else None, found.get(ROPE_FACTORS)
    same = own is None if factors is None else own is not None and np.allclose(own.data, factors, rtol=1e-6)
    if not same:
        raise UserError("K072.factors-rotary-frequencies", where=str(file))
    spec = _read_spec(reader, found)
    config = spec_to_hf(spec)
    with torch.device("meta"):
        network = network_of(spec)
    network.module.to_empty(device="cpu")
    names = gguf.get_tensor_name_map(_architecture(gguf, config["model_type"]), spec.layers)
    with torch.no_grad():
        for name, parameter in network.module.named_parameters():
            disk_name = network.hf_parameter(name).name
            stacked = disk_name if parameter.ndim < 3 else f"{disk_name}.weight"
            tensor = found.pop(_written_name(names, stacked), None)
            if tensor is None:
                raise UserError("K072.file-no-tensor", where=str(file), name=name)
            values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy()).view(
                parameter.shape
            )
            is_llama = config["model_type"] == "llama"
            parameter.copy_(_permuted(values, disk_name, spec, back=True) if is_llama else values)
    if left := found.keys() - {ROPE_FACTORS}:
        raise UserError("K072.file-tensors", where=str(file), left=sorted(left)[:3])
    network.module.eval().requires_grad_(False)
    assert isinstance(network.module, Decoder)
    spec = network.module.spec
    network.module.spec = changed = replace(spec, block=replace(spec.block, rope=rope))
    for layer in network.module.blocks:
        layer.self_attn.rope = rope
    return replace(network, spec=changed)


def _read_spec(reader: Any, tensors: dict[str, Any]) -> ModelSpec:
    architecture = reader.fields["general.architecture"].contents()
    model_type = next(key for key, name in ARCHITECTURES.items() if name == architecture)

    def value(name: str, default: Any = None) -> Any:
        field = reader.fields.get(f"{architecture}.{name}")
        return default if field is None else field.contents()

    config: dict[str, Any] = {
        "model_type": model_type,
        "num_hidden_layers": value("block_count"),
        "hidden_size": value("embedding_length"),
        "num_attention_heads": value("attention.head_count"),
        "num_key_value_heads": value("attention.head_count_kv"),
        "head_dim": value("attention.key_length"),
        "intermediate_size": value("feed_forward_length"),
        "vocab_size": value("vocab_size"),
        "max_position_embeddings": value("context_length"),
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
        "rope_theta": value("rope.freq_base"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "num_experts": value("expert_count"),
        "num_experts_per_tok": value("expert_used_count"),
        "moe_intermediate_size": value("expert_feed_forward_length"),
        "shared_expert_intermediate_size": value("expert_shared_feed_forward_length"),
        "norm_topk_prob": model_type == "qwen3_moe",
        "qkv_bias": "blk.0.attn_q.bias" in tensors,
    }
    return spec_from_hf({key: each for key, each in config.items() if each is not None}, where="the GGUF file")
