"""Builds a tokenizer from the vocabulary in a GGUF file's metadata."""

import math
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from tokenizers import pre_tokenizers as pre
from tokenizers.processors import TemplateProcessing

from jaxpaged.checkpoint.gguf import GgufCheckpoint
from jaxpaged.errors import CheckpointError, JaxpagedError, UnsupportedOptionError
from jaxpaged.text.parts import TokenizerParts

_KEY = "tokenizer.ggml."
_SPACE_MARK = "▁"

# How a text is split into words before BPE, by `tokenizer.ggml.pre`. Two regular expressions differ
# only in how many digits they keep together.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SINGLE_DIGITS = _WORDS % ""
_THREE_DIGITS = _WORDS % "{1,3}"
_GPT2_NAMES = frozenset({"gpt-2"})
_SMOLLM_NAMES = frozenset({"smollm"})
_LLAMA3_NAMES = frozenset({"llama-bpe", "llama3", "llama-v3"})
_QWEN2_NAMES = frozenset({"qwen2", "deepseek-r1-qwen"})


class _TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def build(checkpoint: GgufCheckpoint) -> TokenizerParts | None:
    """None when the file holds no vocabulary."""
    metadata = checkpoint.metadata
    kind = metadata.get(_KEY + "model", "none")
    if kind == "none":
        return None
    builders = {"gpt2": _byte_level_bpe, "llama": _sentencepiece_bpe}
    if kind not in builders:
        raise UnsupportedOptionError(
            "model",
            f"{checkpoint.path}: tokenizer model {kind!r} is not supported, only {list(builders)}",
        )
    try:
        tokens: list[str] = metadata[_KEY + "tokens"]
        ids = _named_ids(metadata, len(tokens))
        backend = builders[kind](metadata, tokens)
        _add_special_tokens(backend, metadata, tokens)
        _add_bos_and_eos(backend, metadata, ids["bos_token"], ids["eos_token"], tokens)
    except KeyError as error:
        raise CheckpointError(f"{checkpoint.path} lacks the metadata {error}") from error
    except JaxpagedError:
        raise
    # why: the library raises bare exceptions, of several lines, for merges and tokens that disagree
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{checkpoint.path}: its vocabulary makes no sense: {reason}"
        ) from error
    return TokenizerParts(
        backend=backend,
        eos_token_id=ids["eos_token"],
        bos_token_id=ids["bos_token"],
        chat_template=metadata.get("tokenizer.chat_template"),
        special_tokens={name: tokens[i] for name, i in ids.items() if i is not None},
    )


def _named_ids(metadata: Mapping[str, Any], num_tokens: int) -> dict[str, int | None]:
    """Ids of the tokens with a role, by the role's name in Hugging Face's files."""
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: metadata.get(f"{_KEY}{key}_token_id") for name, key in names.items()}
    for name, token_id in ids.items():
        if token_id is not None and not 0 <= token_id < num_tokens:
            key = f"{_KEY}{names[name]}_token_id"
            raise CheckpointError(f"{key}={token_id} must be below {num_tokens}, the vocabulary")
    return ids


def _byte_level_bpe(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    """The kind of GPT-2: bytes as characters, merges stored in the file."""
    name = metadata.get(_KEY + "pre", "")
    merges = [tuple(merge.split(" ")) for merge in metadata[_KEY + "merges"]]
    backend = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=merges,  # pyright: ignore[reportArgumentType]  (pairs, by construction)
            # why: Llama 3 has whole words that its own merges do not reach
            ignore_merges=name in _LLAMA3_NAMES,
        )
    )
    backend.pre_tokenizer = _word_splitter(name)
    if name in _QWEN2_NAMES:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _word_splitter(name: str) -> Any:
    whole = pre.ByteLevel(add_prefix_space=False, use_regex=True)  # GPT-2's regular expression
    if name in _GPT2_NAMES:
        return whole
    if name in _SMOLLM_NAMES:
        return pre.Sequence([pre.Digits(individual_digits=True), whole])
    if name in _LLAMA3_NAMES | _QWEN2_NAMES:
        words = _THREE_DIGITS if name in _LLAMA3_NAMES else _SINGLE_DIGITS
        bytes_only = pre.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre.Sequence([pre.Split(Regex(words), "isolated"), bytes_only])
    known = sorted(_GPT2_NAMES | _SMOLLM_NAMES | _LLAMA3_NAMES | _QWEN2_NAMES)
    raise UnsupportedOptionError(
        "model", f"{_KEY}pre {name!r} is not supported, only {', '.join(known)}"
    )


def _sentencepiece_bpe(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    """The kind of Llama 2 and Gemma: spaces marked, unknown characters as byte tokens."""
    types, scores = metadata[_KEY + "token_type"], metadata[_KEY + "scores"]
    # The file has user-defined tokens with spaces in them; merges work on marked text.
    pieces = [token.replace(" ", _SPACE_MARK) for token in tokens]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    mergeable = {
        # why: sentencepiece takes user-defined pieces out of a text before it looks at scores
        piece: math.inf if type_ == _TokenType.USER_DEFINED else score
        for piece, score, type_ in zip(pieces, scores, types, strict=True)
        if type_ in (_TokenType.NORMAL, _TokenType.USER_DEFINED)
    }
    backend = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges_of_scores(mergeable, vocab),
            unk_token=tokens[metadata.get(_KEY + "unknown_token_id", 0)],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    adds_space = metadata.get(_KEY + "add_space_prefix", True)
    backend.pre_tokenizer = pre.Metaspace(
        _SPACE_MARK, prepend_scheme="first" if adds_space else "never", split=False
    )
    steps: list[Any] = [
        decoders.Replace(_SPACE_MARK, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if adds_space:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges_of_scores(
    mergeable: Mapping[str, float], vocab: Mapping[str, int]
) -> list[tuple[str, str]]:
    """Sentencepiece joins the neighbours whose joint piece scores best; BPE wants that as a list.

    Every way to cut a piece in two known pieces is a merge. Better scores come first, among equal
    ones (runs of spaces) longer parts, as in transformers' conversion of such vocabularies.
    """
    merges: list[tuple[float, str, str]] = []
    for piece, score in mergeable.items():
        cuts = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        cuts = [cut for cut in cuts if cut[0] in mergeable and cut[1] in mergeable]
        cuts.sort(key=lambda cut: (vocab[cut[0]], vocab[cut[1]]))
        merges += [(score, left, right) for left, right in cuts]
    merges.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    return [(left, right) for _, left, right in merges]


def _add_special_tokens(backend: Tokenizer, metadata: Mapping[str, Any], tokens: list[str]) -> None:
    """Tokens found in a text as they stand; the control ones among them are left out of texts."""
    types = metadata.get(_KEY + "token_type", [])
    special, plain = [], []
    for token, type_ in zip(tokens, types, strict=bool(types)):
        if type_ in (_TokenType.CONTROL, _TokenType.UNKNOWN):
            special.append(AddedToken(token, normalized=False, special=True))
        # why: runs of spaces are marked in the vocabulary, and made by merges
        elif type_ == _TokenType.USER_DEFINED and backend.token_to_id(token) is not None:
            plain.append(AddedToken(token, normalized=False, special=False))
    backend.add_special_tokens(special)
    backend.add_tokens(plain)


def _add_bos_and_eos(
    backend: Tokenizer,
    metadata: Mapping[str, Any],
    bos_token_id: int | None,
    eos_token_id: int | None,
    tokens: list[str],
) -> None:
    """Adds them around each text where the file says so, or where its kind of model wants them."""
    wants_bos = metadata[_KEY + "model"] == "llama" or metadata.get(_KEY + "pre") in _LLAMA3_NAMES
    before, after = [], []
    if metadata.get(_KEY + "add_bos_token", wants_bos) and bos_token_id is not None:
        before.append(bos_token_id)
    if metadata.get(_KEY + "add_eos_token", False) and eos_token_id is not None:
        after.append(eos_token_id)
    if not before + after:
        return
    backend.post_processor = TemplateProcessing(
        single=[*(tokens[i] for i in before), "$A", *(tokens[i] for i in after)],
        special_tokens=[(tokens[i], i) for i in dict.fromkeys(before + after)],
    )
