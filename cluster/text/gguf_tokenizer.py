"""The `tokenizers.Tokenizer` that a GGUF file's metadata describes: the same ids as the original tokenizer.json.

llama.cpp keeps tokens, their kinds, merges or scores, and the name of the pre-tokenizer; the pipeline around them is
what the originals of that name have.
"""

import logging
from typing import Any

from gguf.constants import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from ...scheduler.errors import CheckpointError
from ...workers.checkpoint.gguf_file import GGUFFile

logger = logging.getLogger(__name__)

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"

# tokenizer.ggml.pre: the patterns that split a text before merging, one after the other.
_PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {
    "gpt-2": (_GPT2,),
    "smollm": (_DIGIT, _GPT2),
    "starcoder": (_DIGIT, _GPT2),
    "refact": (_DIGIT, _GPT2),
    "llama-bpe": (_LLAMA3,),
    "llama-v3": (_LLAMA3,),
    "llama3": (_LLAMA3,),
    "smaug-bpe": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "deepseek-r1-qwen": (_QWEN2,),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", _DIGIT),
    "tekken": (_TEKKEN,),
    # What llama.cpp falls back on where the converter did not name the original.
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
}
_ADD_BOS = {"llama-bpe", "llama-v3", "llama3", "tekken"}  # unless the file says otherwise
_IGNORE_MERGES = {"llama-bpe", "llama-v3", "llama3", "tekken"}  # a word that is a token is that token
_NFC = {"qwen2", "deepseek-r1-qwen"}


def build_backend(file: GGUFFile) -> Tokenizer:
    """Raises `CheckpointError` naming a tokenizer model or pre-tokenizer that is not supported, or what is damaged."""
    model = file.get("tokenizer.ggml.model", str)
    if model not in _BUILDERS:
        raise CheckpointError(
            f"{file.path}: tokenizer model {model!r} is not supported; supported: {', '.join(_BUILDERS)}"
        )
    tokens = _tokens(file)
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise CheckpointError(f"{file.path}: tokenizer.ggml.tokens holds a token twice")
    kinds = file.get("tokenizer.ggml.token_type", list, [TokenType.NORMAL] * len(tokens))
    if len(kinds) != len(tokens):
        raise CheckpointError(f"{file.path}: {len(tokens)} tokens but {len(kinds)} token types")
    try:
        backend = _BUILDERS[model](file, vocab, kinds)
    except CheckpointError:
        raise
    except Exception as error:  # tokenizers raises plain Exceptions, for a merge of unknown tokens for instance
        raise CheckpointError(f"{file.path}: the tokenizer cannot be built: {error}") from None
    special = {TokenType.CONTROL, TokenType.UNKNOWN} if model == "llama" else {TokenType.CONTROL}
    backend.add_tokens(
        [
            AddedToken(token, special=kind in special, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if token and (kind in special or kind == TokenType.USER_DEFINED)
        ]
    )
    return backend


def _tokens(file: GGUFFile) -> list[str]:
    tokens = file.get("tokenizer.ggml.tokens", list)
    if not tokens or not isinstance(tokens[0], str):
        raise CheckpointError(f"{file.path}: tokenizer.ggml.tokens must hold strings")
    return tokens


def special_tokens(file: GGUFFile) -> dict[str, str]:
    """bos_token and its like, as templates and transformers name them."""
    tokens = _tokens(file)
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: file.metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}
    for name, i in ids.items():
        if i is not None and not (isinstance(i, int) and 0 <= i < len(tokens)):
            raise CheckpointError(f"{file.path}: {name} is {i!r}, but there are {len(tokens)} tokens")
    return {name: tokens[i] for name, i in ids.items() if i is not None}


def _byte_level(file: GGUFFile, vocab: dict[str, int], kinds: list[int]) -> Tokenizer:
    """GPT-2's scheme: bytes as printable characters, merges in the order they were learned."""
    pre = file.metadata.get("tokenizer.ggml.pre")
    if pre is None:
        pre = "default"
        logger.warning("%s does not name its pre-tokenizer: using llama.cpp's default, ids may differ", file.path)
    if pre not in _PRE_TOKENIZERS:
        raise CheckpointError(
            f"{file.path}: pre-tokenizer {pre!r} is not supported; supported: {', '.join(_PRE_TOKENIZERS)}"
        )
    merges = []
    for merge in file.get("tokenizer.ggml.merges", list):
        left, space, right = merge.partition(" ")
        if not space or not left or not right:
            raise CheckpointError(f"{file.path}: tokenizer.ggml.merges holds {merge!r}, which is not two tokens")
        merges.append((left, right))
    backend = Tokenizer(models.BPE(vocab, merges, ignore_merges=pre in _IGNORE_MERGES))
    if pre in _NFC:
        backend.normalizer = normalizers.NFC()
    splits: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _PRE_TOKENIZERS[pre]]
    splits.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    backend.pre_tokenizer = pre_tokenizers.Sequence(splits)
    backend.decoder = decoders.ByteLevel()
    _add_around(backend, file, add_bos=pre in _ADD_BOS)
    return backend


def _sentencepiece(file: GGUFFile, vocab: dict[str, int], kinds: list[int]) -> Tokenizer:
    """SentencePiece's BPE, as Llama 2 has it: spaces as ▁, the best-scored merge first, unknown characters as bytes."""
    scores = file.get("tokenizer.ggml.scores", list)
    if len(scores) != len(vocab):
        raise CheckpointError(f"{file.path}: {len(vocab)} tokens but {len(scores)} scores")
    if (
        file.metadata.get("tokenizer.ggml.remove_extra_whitespaces")
        or "tokenizer.ggml.precompiled_charsmap" in file.metadata
    ):
        raise CheckpointError(f"{file.path}: a SentencePiece model that normalizes text is not supported")
    outside = {TokenType.CONTROL, TokenType.UNKNOWN, TokenType.BYTE}
    unknown = next((token for token, i in vocab.items() if kinds[i] == TokenType.UNKNOWN), None)
    merges = []
    for token, i in vocab.items():
        if kinds[i] in outside:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if (
                left in vocab
                and right in vocab
                and kinds[vocab[left]] not in outside
                and kinds[vocab[right]] not in outside
            ):
                merges.append((-scores[i], -cut, left, right))
    # The longest left part first among equals is what SentencePiece's left-to-right merging of a run comes to.
    merges.sort()
    backend = Tokenizer(
        models.BPE(vocab, [merge[2:] for merge in merges], unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = file.get("tokenizer.ggml.add_space_prefix", bool, True)
    to_marks = [normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), *to_marks] if prefix else to_marks)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    _add_around(backend, file, add_bos=True)
    return backend


def _add_around(backend: Tokenizer, file: GGUFFile, add_bos: bool) -> None:
    """BOS and EOS around every text, where the file wants them."""
    special = special_tokens(file)
    template, ids = ["$A:0"], []
    for name, default, at in (("bos_token", add_bos, 0), ("eos_token", False, 2)):
        if file.get(f"tokenizer.ggml.add_{name}", bool, default) and name in special:
            template.insert(at, f"{special[name]}:0")
            ids.append((special[name], file.metadata[f"tokenizer.ggml.{name}_id"]))
    if ids:
        backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)


_BUILDERS = {"gpt2": _byte_level, "llama": _sentencepiece}
