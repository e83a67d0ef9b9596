"""Text to token ids and back to bytes, for one model file."""

import os
import re
from collections.abc import Iterator, Mapping

import tokenizers

from app.text.bpe import byte_level_bpe, pre_tokenizer_of
from app.text.slicing import BYTE_LEVEL_BORDER, SLICE_CHARS, WORD_BORDER, slices
from app.text.specials import SpecialTokens
from app.text.spm import crosses_words, spm_bpe
from app.text.vocabulary import WORD_SPACE, TokenKind, Vocabulary
from engine.gguf import GgufFile


class Tokenizer:
    """Immutable once built, safe to use from several threads.

    Special tokens are looked for here, not in the `tokenizers` package, so that one model serves both ways of reading
    a text, and a long text is tokenized in slices: the package lets go of the interpreter lock only for the work on
    one slice.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        model: tokenizers.Tokenizer,
        border: re.Pattern[str] | None,
        *,
        add_bos: bool,
        add_eos: bool,
        adds_space: bool,
    ) -> None:
        self.vocab_size = len(vocabulary.texts)
        self.bos_id = vocabulary.bos_id
        self.eos_id = vocabulary.eos_id
        self.stop_ids = vocabulary.stop_ids
        """Tokens that end an answer: end of sequence, of turn, of message."""
        self.add_bos = add_bos and self.bos_id is not None
        self.add_eos = add_eos
        self.adds_space = adds_space
        """A text's first word is written with a space before it, which a one-shot decode takes away again."""
        self.token_bytes = vocabulary.token_bytes()
        """By id: the bytes it stands for; for a control token its own text."""
        self.text_bytes = self.token_bytes.copy()
        """By id: the bytes it adds to an answer; none for control, unknown and unused tokens."""
        self._silent = frozenset(vocabulary.of_kind(TokenKind.CONTROL, TokenKind.UNKNOWN, TokenKind.UNUSED))
        for token in self._silent:
            self.text_bytes[token] = b""
        self.specials: Mapping[str, int] = vocabulary.named(
            TokenKind.CONTROL, TokenKind.UNKNOWN, TokenKind.USER_DEFINED
        )
        """Ids by text of the tokens that are found in a text before any other."""
        self._vocabulary = vocabulary
        self._model = model
        self._border = border
        self._spaced = vocabulary.model == "llama"
        self._all_specials = SpecialTokens(self.specials)
        self._user_defined = SpecialTokens(vocabulary.named(TokenKind.USER_DEFINED))

    @classmethod
    def from_gguf(cls, gguf: GgufFile) -> "Tokenizer":
        """Raises ModelFileError naming the field that is missing, broken or not supported."""
        # Read by the package when it first works: one slice at a time leaves its thread pool nothing to do.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        vocabulary = Vocabulary.from_gguf(gguf)
        border: re.Pattern[str] | None = BYTE_LEVEL_BORDER
        if vocabulary.model == "llama":
            model = spm_bpe(gguf, vocabulary)
            border = None if crosses_words(vocabulary) else WORD_BORDER
            add_bos, adds_space = True, gguf.flag("tokenizer.ggml.add_space_prefix", True)
        else:
            pre = pre_tokenizer_of(gguf)
            model = byte_level_bpe(gguf, vocabulary, pre)
            add_bos, adds_space = pre.add_bos, False
        try:
            return cls(
                vocabulary,
                model,
                border,
                add_bos=gguf.flag("tokenizer.ggml.add_bos_token", add_bos),
                add_eos=gguf.flag("tokenizer.ggml.add_eos_token", False),
                adds_space=adds_space,
            )
        except RecursionError:
            return gguf.fail("tokenizer.ggml.tokens", "special tokens begin with one another a thousand times over")

    @property
    def bos_token(self) -> str | None:
        return None if self.bos_id is None else self._vocabulary.texts[self.bos_id]

    @property
    def eos_token(self) -> str | None:
        return None if self.eos_id is None else self._vocabulary.texts[self.eos_id]

    def is_control(self, token: int) -> bool:
        """Whether the token adds nothing to an answer."""
        return token in self._silent

    def encode(
        self,
        text: str,
        *,
        parse_special: bool,
        add_bos: bool = False,
        limit: int | None = None,
        slice_chars: int = SLICE_CHARS,
    ) -> list[int]:
        """Token ids [n].

        Args:
            parse_special: read control tokens written in the text as tokens; otherwise they are ordinary text.
                User-defined tokens are always read, as the models' own tokenizers do.
            add_bos: begin with the token for it, unless the text does so itself, as a chat template may.
            limit: stop soon after so many tokens; a result longer than this is the beginning only.
            slice_chars: about how much is tokenized at a time; the ids do not depend on it.
        Raises:
            UnicodeEncodeError: a lone surrogate in `text`.
        """
        ids: list[int] = []
        for some in self._encode_slices(text, self._all_specials if parse_special else self._user_defined, slice_chars):
            ids += some
            if limit is not None and len(ids) > limit:
                break
        if add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def _encode_slices(self, text: str, specials: SpecialTokens, slice_chars: int) -> Iterator[list[int]]:
        after_special = True  # also at the beginning
        for part in specials.split(text):
            if isinstance(part, int):
                yield [part]
            else:
                for piece in slices(self._spelt(part, after_special), self._border, slice_chars):
                    # Unlike `encode`, the batch call runs without the interpreter lock.
                    yield self._model.encode_batch_fast([piece], add_special_tokens=False)[0].ids
            after_special = isinstance(part, int)

    def _spelt(self, text: str, after_special: bool) -> str:
        """As the model's vocabulary writes it: SentencePiece marks spaces, and puts one before the first word."""
        if not self._spaced:
            return text
        return (WORD_SPACE if self.adds_space and after_special else "") + text.replace(" ", WORD_SPACE)
