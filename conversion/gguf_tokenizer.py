"""Builds the tokenizer that a GGUF file's metadata describes.

Byte-level BPE (`tokenizer.ggml.model` "gpt2") and SentencePiece BPE ("llama") are supported. For the first, the file
does not contain the regular expression that splits text before merging, only its name (`tokenizer.ggml.pre`). The
second is converted to BPE with byte fallback. `gguf_file.py` calls `read_tokenizer` and `ends`.
"""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from . import tokenizer
from .errors import CheckpointError
from .schema import Id, Strict, checked_under

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CL100K = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_O200K_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"

_SPLITS: Mapping[str, str] = {
    "cl100k": _CL100K,
    "qwen2": _CL100K.replace(r"\p{N}{1,3}", r"\p{N}"),
    "qwen35": _CL100K.replace(r"\p{N}{1,3}", r"\p{N}")
    .replace(r"\p{L}+", r"[\p{L}\p{M}]+")
    .replace(r" ?[^\s\p{L}", r" ?[^\s\p{L}\p{M}"),
    "seed": _CL100K.replace(r"\p{N}{1,3}", r"\p{N}").replace(r"]+[\r\n]*", "]+"),
    "o200k": _O200K_WORD % (f"{_CONTRACTIONS}?", f"{_CONTRACTIONS}?") + r"|\p{N}{1,3}" + _O200K_REST,
    "tekken": _O200K_WORD % ("", "") + r"|\p{N}" + _O200K_REST,
}
"""Regular expressions that split text into pieces. BPE merges tokens within a piece."""

PRE_TOKENIZERS: Mapping[str, str] = {
    "llama-bpe": "cl100k",
    "llama3": "cl100k",
    "llama-v3": "cl100k",
    "dbrx": "cl100k",
    "smaug-bpe": "cl100k",
    "glm4": "cl100k",
    "chatglm-bpe": "cl100k",
    "qwen2": "qwen2",
    "deepseek-r1-qwen": "qwen2",
    "qwen35": "qwen35",
    "seed-coder": "seed",
    "gpt-4o": "o200k",
    "tekken": "tekken",
    "gpt-2": "gpt2",
    "phi-2": "gpt2",
    "olmo": "gpt2",
    "mpt": "gpt2",
    "smollm": "digits",
    "starcoder": "digits",
    "refact": "digits",
    "command-r": "digits",
    "default": "default",
}
"""Known values of `tokenizer.ggml.pre`. Each maps to a key of `_SPLITS`, or to "gpt2", "digits" or "default".

`_splitter` makes the splitter from it. To add one, add a row and, if it is new, a pattern.
"""

_WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3", "tekken")
"""Values of `tokenizer.ggml.pre` for which a piece that is itself a token is not split, regardless of the merges."""

_BEGUN = ("llama-bpe", "llama3", "llama-v3", "tekken")
"""Values of `tokenizer.ggml.pre` for which the start token is prepended if `add_bos_token` is absent."""

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
"""Values of `tokenizer.ggml.token_type` whose tokens are matched before text is split."""

END_TEXTS = frozenset(
    {
        "</s>",
        "<|end|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<end_of_turn>",
        "<EOT>",
        "_<EOT>",
        "<end_of_utterance>",
        "<｜end▁of▁sentence｜>",
    }
)
"""Texts of tokens that always end an answer: llama.cpp's list for the supported families.

They count as control tokens, whatever their `token_type`. `</s>` is an exception, see `ends`.
"""

_PHI3_STRIPS_NOT = ("<unk>", "<s>", "<|endoftext|>")
"""Special tokens of Phi-3's SentencePiece vocabulary that keep the spaces after them. The others remove them."""

_PHI4_STRIPS = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|tag|>")
"""Special tokens of Phi-4-mini's vocabulary that remove the spaces after them."""

_SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
"""Special tokens by their names in `Tokenizer`, and the fields with their ids."""

_LONGEST = 1024
"""Maximum characters per token. Deriving merges tries every cut of every token."""

_MOST_CUT = 1 << 28
"""Maximum sum of squared token lengths, which bounds the time of `_merges` to a few seconds. The largest known
vocabularies have a tenth of it.
"""


class _Fields(Strict):
    """The fields under `tokenizer.ggml.` that are read."""

    model: str | None = None
    pre: str = "default"
    tokens: list[Annotated[str, Field(max_length=_LONGEST)]] | None = None
    merges: list[str] = Field(default_factory=list)
    scores: list[float] | None = None
    token_type: list[int] | None = None
    add_bos_token: bool | None = None
    add_space_prefix: bool = True
    bos_token_id: Id | None = None
    eos_token_id: Id | None = None
    unknown_token_id: Id | None = None
    padding_token_id: int | None = None


def ends(text: object, token_type: object) -> bool:
    """Whether a token always ends an answer. A user-defined `</s>` does not: it is an HTML tag in Gemma's vocabulary."""
    return text in END_TEXTS and (text != "</s>" or token_type != _USER_DEFINED)


def read_tokenizer(
    metadata: Mapping[str, Any],
    *,
    eos: Sequence[int],
    bos: int | None,
    source: Path,
    vocab_size: int | None = None,
) -> tokenizer.Tokenizer | None:
    """Build the tokenizer from the `tokenizer.*` fields of a GGUF file.

    Args:
        metadata: the file's metadata.
        eos: ids that end a sequence.
        bos: id that starts a sequence, if any.
        source: the file, for messages.
        vocab_size: number of tokens that the model knows. A larger vocabulary gives a warning.

    Returns:
        The tokenizer. None if the file has no tokens, or, with a warning, if the tokenizer is unknown. The model then
        takes token ids.

    Raises:
        CheckpointError: the fields have wrong types or contradict each other.
    """
    fields = checked_under(_Fields, metadata, "tokenizer.ggml.", source)
    template = checked_under(_Template, metadata, "tokenizer.", source).chat_template
    kind, pre, tokens = fields.model, fields.pre, fields.tokens
    if tokens is None:
        return None
    types = [1] * len(tokens) if fields.token_type is None else fields.token_type
    if len(types) != len(tokens):
        raise CheckpointError(
            f"{source}: tokenizer.ggml.token_type needs one type for each of the {len(tokens)} tokens"
        )
    special = {}
    for name, key in _SPECIAL.items():
        if (i := getattr(fields, key)) is not None:
            if i >= len(tokens):
                if name == "pad_token":  # nothing is padded with it
                    continue
                raise CheckpointError(f"{source}: tokenizer.ggml.{key} is {i}; it should be below {len(tokens)}")
            special[name] = tokens[i]
    if kind == "gpt2" and pre in PRE_TOKENIZERS:
        with tokenizer.library_errors(f"{source}: tokenizer.ggml.merges do not fit tokenizer.ggml.tokens"):
            backend = _byte_level(tokens, fields.merges, pre)
        add_bos = pre in _BEGUN
    elif kind == "llama":
        if fields.scores is None or len(fields.scores) != len(tokens):
            raise CheckpointError(
                f"{source}: tokenizer.ggml.scores needs one score for each of the {len(tokens)} tokens"
            )
        if sum(len(token) ** 2 for token in tokens) > _MOST_CUT:
            raise CheckpointError(f"{source}: tokenizer.ggml.tokens has too many long tokens to derive their merges")
        with tokenizer.library_errors(f"{source}: tokenizer.ggml.tokens is not a valid vocabulary"):
            backend = _sentencepiece(tokens, fields.scores, fields.unknown_token_id or 0, fields.add_space_prefix)
        add_bos = True
    else:
        what = f"tokenizer.ggml.pre {pre!r}" if kind == "gpt2" else f"tokenizer.ggml.model {kind!r}"
        known = ", ".join(PRE_TOKENIZERS) if kind == "gpt2" else "gpt2, llama"
        warnings.warn(
            f"{source}: unknown {what} (known: {known}), so the model is loaded without a tokenizer; "
            "prompts given as token ids still work",
            stacklevel=2,
        )
        return None
    if fields.add_bos_token is not None:
        add_bos = fields.add_bos_token
    with tokenizer.library_errors(f"{source}: tokenizer.ggml.tokens is not a valid vocabulary"):
        phi3 = metadata.get("general.architecture") == "phi3"
        added: dict[bool, list[AddedToken]] = {True: [], False: []}
        for token, token_type in zip(tokens, types, strict=True):
            if ends(token, token_type):
                token_type = _CONTROL
            if token_type not in (_UNKNOWN, _CONTROL, _USER_DEFINED):
                continue
            strips = phi3 and (token not in _PHI3_STRIPS_NOT if kind == "llama" else token in _PHI4_STRIPS)
            is_special = token_type != _USER_DEFINED
            added[is_special].append(AddedToken(token, normalized=False, special=is_special, rstrip=strips))
        # All at once, as each call builds the matcher of added tokens again.
        backend.add_special_tokens(added[True])
        backend.add_tokens(added[False])
        if add_bos and bos is not None and bos < len(tokens):
            start = tokens[bos]
            backend.post_processor = processors.TemplateProcessing(
                single=[start, "$A"], pair=[start, "$A", start, "$B"], special_tokens=[(start, bos)]
            )
    made = tokenizer.Tokenizer(backend, eos=eos, bos=bos, chat_template=template, special=special)
    return made.within(vocab_size, source)


class _Template(Strict):
    chat_template: str | None = None


def _byte_level(tokens: Sequence[str], merges: Sequence[str], pre: str) -> Tokenizer:
    """Build byte-level BPE."""
    vocabulary = {token: i for i, token in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=pre in _WHOLE_WORDS_FIRST))
    backend.pre_tokenizer = _splitter(PRE_TOKENIZERS[pre])
    backend.decoder = decoders.ByteLevel()
    if PRE_TOKENIZERS[pre] == "qwen2":
        backend.normalizer = normalizers.NFC()
    return backend


def _splitter(way: str) -> pre_tokenizers.PreTokenizer:
    """Return the splitter for a value of `PRE_TOKENIZERS`."""
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    match way:
        case "gpt2":
            return gpt2
        case "digits":  # splits off each digit before words
            return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
        case "default":  # used by files from before `tokenizer.ggml.pre` existed
            first = pre_tokenizers.Split(Regex(r"[\p{P}\$\+<=>\^~\|]+"), "isolated")
            numbers = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in (r"\p{N}+", "[0-9][0-9][0-9]")]
            words = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
            return pre_tokenizers.Sequence(
                [first, pre_tokenizers.Split(Regex(words), "isolated"), *numbers, bytes_only]
            )
        case _:
            return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_SPLITS[way]), "isolated"), bytes_only])


def _sentencepiece(tokens: Sequence[str], scores: Sequence[float], unknown: int, prefix: bool) -> Tokenizer:
    """Build BPE with byte fallback from a SentencePiece vocabulary.

    Args:
        tokens: the vocabulary.
        scores: score of each token; tokens with higher scores are merged first.
        unknown: id of the unknown token.
        prefix: whether a space is added before the text.
    """
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges(vocabulary, scores),
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    space = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space]) if prefix else space
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(content=" ", left=1))
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges(vocabulary: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Derive BPE merges from SentencePiece's rule: merge the neighbours whose joint token has the best score."""
    found = []
    for token, i in vocabulary.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                found.append((-scores[i], vocabulary[left], vocabulary[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]
