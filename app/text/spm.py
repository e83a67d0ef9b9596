"""SentencePiece-style BPE (`tokenizer.ggml.model` = llama): a vocabulary with scores and no list of merges.

The rule, SentencePiece's and llama.cpp's: of all neighbouring pieces that together are a token join the two with the
best score, the leftmost on a tie, again and again; a character that is no token becomes byte tokens. A BPE model does
the same when every way to put a token together from two others is a merge, ranked by the token's score.

Where two tokens have the same score a ranking is stricter than "leftmost". Longer tokens first is what leftmost gives
in runs of one character, where real files have such ties (Gemma's spaces, all of score 0); elsewhere each token of a
trained vocabulary has its own score.
"""

import numpy as np
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from app.text.vocabulary import WORD_SPACE, TokenKind, Vocabulary
from engine.gguf import GgufFile

SCORES = "tokenizer.ggml.scores"
_JOINABLE = (TokenKind.NORMAL, TokenKind.USER_DEFINED, TokenKind.UNUSED)


def crosses_words(vocabulary: Vocabulary) -> bool:
    """Whether a token goes on after a word's end: then words must not be cut apart."""
    return any(WORD_SPACE in text.lstrip(WORD_SPACE) for text in vocabulary.named(*_JOINABLE))


def spm_bpe(gguf: GgufFile, vocabulary: Vocabulary) -> Tokenizer:
    """Expects text whose spaces are `▁` already, without special tokens. Raises ModelFileError for broken scores."""
    scores = _scores(gguf, len(vocabulary.texts))
    joinable = vocabulary.named(*_JOINABLE)
    others = vocabulary.named(TokenKind.BYTE, TokenKind.UNKNOWN)
    unknown = next(iter(vocabulary.named(TokenKind.UNKNOWN)), None)
    merges = _merges(joinable, scores)
    vocab = {**joinable, **others}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unknown, byte_fallback=True))
    if not crosses_words(vocabulary):  # short words, which the model also caches
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(f"{WORD_SPACE}*[^{WORD_SPACE}]+"), "isolated")
    return tokenizer


def _merges(joinable: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every (left, right) that makes a token, best first."""
    pairs: list[tuple[str, str]] = []
    score: list[float] = []
    for text, token in joinable.items():
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in joinable and right in joinable:
                pairs.append((left, right))
                score.append(scores[token])
    length = np.array([len(left) + len(right) for left, right in pairs], np.int64)
    order = np.lexsort((-length, -np.array(score, np.float64)))
    return [pairs[n] for n in order.tolist()]


def _scores(gguf: GgufFile, tokens: int) -> list[float]:
    array = gguf.array(SCORES)
    if array.length != tokens:
        gguf.fail(SCORES, f"has {array.length} entries for {tokens} tokens")
    values = array.numbers()
    if not np.isfinite(values).all():
        gguf.fail(SCORES, "holds NaN or infinity")
    scores: list[float] = values.tolist()
    return scores
