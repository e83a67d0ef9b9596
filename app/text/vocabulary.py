"""The tokens of a model file: text, kind, the bytes each stands for, and the ids with a role."""

import re
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from engine.gguf import GgufFile

WORD_SPACE = "▁"
"""SentencePiece's way to write a space."""


class TokenKind(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    """Added by the model's makers, found in a text before anything else, shown in an answer."""
    UNUSED = 5
    BYTE = 6


END_TOKENS = frozenset(
    ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>")
)
"""Control tokens that end an answer also in files that do not say so by id."""


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Index into the lists is the token id."""

    model: str
    """`gpt2` (byte-level BPE) or `llama` (SentencePiece)."""
    texts: list[str]
    ids: dict[str, int]
    """By text; a token without text has none."""
    kinds: npt.NDArray[np.int64]
    bos_id: int | None
    eos_id: int | None
    stop_ids: tuple[int, ...]
    """Sorted."""

    @classmethod
    def from_gguf(cls, gguf: GgufFile) -> "Vocabulary":
        """Raises ModelFileError for an unknown model, wrong array lengths, a token given twice, an id out of range."""
        model = gguf.text("tokenizer.ggml.model")
        if model not in ("gpt2", "llama"):
            gguf.fail("tokenizer.ggml.model", f"'{model}' is not supported; supported: gpt2, llama")
        texts = gguf.array("tokenizer.ggml.tokens").strings()
        if not texts:
            gguf.fail("tokenizer.ggml.tokens", "there is no token")
        ids = dict(zip(texts, range(len(texts)), strict=True))
        if len(ids) + max(texts.count("") - 1, 0) != len(texts):
            twice = next(text for token, text in enumerate(texts) if text and ids[text] != token)
            gguf.fail("tokenizer.ggml.tokens", f"the token '{twice}' is there twice")
        ids.pop("", None)
        kinds = _kinds(gguf, len(texts))
        spm = model == "llama"
        bos_id = _token_id(gguf, "bos", len(texts), 1 if spm else None)
        eos_id = _token_id(gguf, "eos", len(texts), 2 if spm else None)
        stops = {eos_id, _token_id(gguf, "eot", len(texts)), _token_id(gguf, "eom", len(texts))}
        stops |= {ids[text] for text in END_TOKENS & ids.keys() if kinds[ids[text]] == TokenKind.CONTROL}
        return cls(model, texts, ids, kinds, bos_id, eos_id, tuple(sorted(stop for stop in stops if stop is not None)))

    def of_kind(self, *kinds: TokenKind) -> list[int]:
        """The tokens of these kinds, in order."""
        found: list[int] = np.flatnonzero(np.isin(self.kinds, kinds)).tolist()
        return found

    def named(self, *kinds: TokenKind) -> dict[str, int]:
        """The tokens of these kinds, by text."""
        return {self.texts[token]: token for token in self.of_kind(*kinds) if self.texts[token]}

    def token_bytes(self) -> list[bytes]:
        """What each token stands for; one that stands for itself (control, user-defined) for its text."""
        decode = _spm_bytes if self.model == "llama" else _byte_level_bytes
        data = [decode(text) for text in self.texts]
        for token in self.of_kind(TokenKind.CONTROL, TokenKind.USER_DEFINED, TokenKind.UNKNOWN):
            data[token] = self.texts[token].encode()
        for token in self.of_kind(TokenKind.BYTE):
            data[token] = _byte_token(self.texts[token])
        return data


def _kinds(gguf: GgufFile, tokens: int) -> npt.NDArray[np.int64]:
    """A kind for every token; files without the array have normal tokens only."""
    array = gguf.array("tokenizer.ggml.token_type", None)
    if array is None:
        return np.full(tokens, TokenKind.NORMAL, np.int64)
    if array.length != tokens:
        gguf.fail("tokenizer.ggml.token_type", f"has {array.length} entries for {tokens} tokens")
    return array.numbers().astype(np.int64)


def _token_id(gguf: GgufFile, role: str, tokens: int, default: int | None = None) -> int | None:
    key = f"tokenizer.ggml.{role}_token_id"
    token = gguf.u32(key, default)
    if token is None or token < tokens:
        return token
    return gguf.fail(key, f"{token} is outside the vocabulary of {tokens} tokens") if key in gguf.metadata else None


def byte_alphabet() -> dict[int, str]:
    """GPT-2's byte alphabet: printable bytes stand for themselves, the others for characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + n) for n, byte in enumerate(others)}


_BYTE_OF_CHARACTER = {ord(character): chr(byte) for byte, character in byte_alphabet().items()}
_FOREIGN = {code: "\u0100" for code in range(0x100) if code not in _BYTE_OF_CHARACTER}
_TO_LATIN1 = _FOREIGN | _BYTE_OF_CHARACTER
"""For str.translate: the byte as a character below U+0100, and anything outside the alphabet as one above."""


def _byte_level_bytes(text: str) -> bytes:
    if text.isascii():  # each of these stands for itself
        return text.encode()
    try:
        return text.translate(_TO_LATIN1).encode("latin-1")
    except UnicodeEncodeError:  # not in the byte alphabet: an added token, which is its own text
        return text.encode()


def _spm_bytes(text: str) -> bytes:
    return text.replace(WORD_SPACE, " ").encode()


def _byte_token(text: str) -> bytes:
    """`<0x0A>` → b"\\n"."""
    match = re.fullmatch("<0x([0-9A-Fa-f]{2})>", text)
    return bytes.fromhex(match[1]) if match else text.encode()
