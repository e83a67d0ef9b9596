"""How the supported families cut text into words before byte-level BPE, by `tokenizer.ggml.pre`.

The expressions are those of the models' own tokenizer files; the names and the groups are llama.cpp's. A word is never
joined with its neighbour, so they decide the ids as much as the merges do.
"""

from dataclasses import dataclass

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _words(digits: str) -> str:
    """Llama 3's and Qwen2's rule, which differ in how many digits make a word."""
    return rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


def _cased_words(digits: str, suffix: str) -> str:
    """Tekken's and GPT-4o's rule: a word also ends where lower case turns to upper."""
    start = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{start}{_UPPER}*{_LOWER}+{suffix}|{start}{_UPPER}+{_LOWER}*{suffix}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


@dataclass(frozen=True)
class PreTokenizer:
    """`patterns` are applied one after the other, each to the pieces the one before left."""

    patterns: tuple[str, ...]
    whole_words: bool = False
    """A word that is itself a token is that token, whatever the merges say (`ignore_merges`)."""
    nfc: bool = False
    """Text is brought to NFC first, as the model's own tokenizer does. (llama.cpp leaves that out.)"""
    add_bos: bool = False
    """Default of tokenizer.ggml.add_bos_token."""


_LLAMA3 = PreTokenizer((_words(r"\p{N}{1,3}"),), whole_words=True, add_bos=True)
_SMOLLM = PreTokenizer((r"\p{N}", _GPT2))
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": PreTokenizer((_GPT2,)),
    "trillion": PreTokenizer((_GPT2,)),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "pixtral": _LLAMA3,
    "smaug-bpe": PreTokenizer((_words(r"\p{N}{1,3}"),)),
    "tekken": PreTokenizer((_cased_words(r"\p{N}", ""),), whole_words=True, add_bos=True),
    "gpt-4o": PreTokenizer((_cased_words(r"\p{N}{1,3}", f"{_CONTRACTION}?"),)),
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "refact": _SMOLLM,
    "minerva-7b": _SMOLLM,
    "qwen2": PreTokenizer((_words(r"\p{N}"),), nfc=True),
    "deepseek-r1-qwen": PreTokenizer((_words(r"\p{N}"),)),
    "qwen35": PreTokenizer((_QWEN35,), nfc=True),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
}
