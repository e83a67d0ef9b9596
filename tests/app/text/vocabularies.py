"""Small model files for the tokenizer's tests, and SentencePiece's merging rule written down as it is told."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from app.text.tokenizer import Tokenizer
from app.text.vocabulary import TokenKind
from engine.gguf import open_gguf
from tests.engine.gguf.building import Draft
from tests.golden.cases import golden_dir

BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


def golden_draft(name: str, pre: str | None = None) -> Draft:
    """The vocabulary of a golden `tokenizers` file as GGUF metadata, with its own or another pre-tokenizer."""
    source = json.loads((golden_dir() / "tokenizer" / f"tokenizer-{name}.json").read_text(encoding="utf-8"))
    ids: dict[str, int] = source["model"]["vocab"] | {token["content"]: token["id"] for token in source["added_tokens"]}
    kinds = dict.fromkeys(ids, TokenKind.NORMAL)
    for token in source["added_tokens"]:
        kinds[token["content"]] = TokenKind.CONTROL if token["special"] else TokenKind.USER_DEFINED
    texts = sorted(ids, key=ids.__getitem__)
    assert [ids[text] for text in texts] == list(range(len(texts)))
    return bpe_draft(
        texts, [" ".join(merge) for merge in source["model"]["merges"]], [kinds[t] for t in texts], pre or name
    )


def bpe_draft(texts: list[str], merges: list[str], kinds: list[int], pre: str) -> Draft:
    return Draft(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.tokens": texts,
            "tokenizer.ggml.token_type": [int(kind) for kind in kinds],
            "tokenizer.ggml.merges": merges,
        }
    )


def spm_draft(scored: dict[str, float], specials: dict[str, TokenKind] | None = None) -> Draft:
    """<unk>, <s>, </s>, the 256 byte tokens, the `specials`, then `scored`."""
    head = {"<unk>": TokenKind.UNKNOWN, "<s>": TokenKind.CONTROL, "</s>": TokenKind.CONTROL}
    kinds = (
        head | dict.fromkeys(BYTE_TOKENS, TokenKind.BYTE) | (specials or {}) | dict.fromkeys(scored, TokenKind.NORMAL)
    )
    return Draft(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": list(kinds),
            "tokenizer.ggml.token_type": [int(kind) for kind in kinds.values()],
            "tokenizer.ggml.scores": [float(scored.get(text, 0.0)) for text in kinds],
        }
    )


def tokenizer_of(draft: Draft, folder: Path) -> Tokenizer:
    return Tokenizer.from_gguf(open_gguf(draft.write(folder)))


def spm_reference(text: str, scored: dict[str, float]) -> list[str]:
    """Tokens of `text`, whose spaces are `▁`: join the best neighbours, the leftmost on a tie, until none can be."""
    pieces = list(text)
    while True:
        joins = [(-scored[a + b], n) for n, (a, b) in enumerate(pairwise(pieces)) if a + b in scored]
        if not joins:
            break
        _, n = min(joins)
        pieces[n : n + 2] = [pieces[n] + pieces[n + 1]]
    return [t for piece in pieces for t in ([piece] if piece in scored else [BYTE_TOKENS[b] for b in piece.encode()])]


def trained_spm(words: list[str], joins: int) -> dict[str, float]:
    """Scores as SentencePiece's BPE trainer gives them: the most frequent pair next, each token worse than the last."""
    split = [list("▁" + word) for word in words]
    tokens = sorted({character for word in split for character in word})
    for _ in range(joins):
        counts: dict[str, int] = {}
        for word in split:
            for a, b in pairwise(word):
                counts[a + b] = counts.get(a + b, 0) + 1
        fresh = [(-count, pair) for pair, count in counts.items() if pair not in tokens]
        if not fresh:
            break
        best = min(fresh)[1]
        tokens.append(best)
        for word in split:
            n = 0
            while n < len(word) - 1:
                if word[n] + word[n + 1] == best:
                    word[n : n + 2] = [best]
                n += 1
    return {token: -float(rank) for rank, token in enumerate(tokens)}


def metadata_without(draft: Draft, *keys: str) -> dict[str, Any]:
    return {key: value for key, value in draft.metadata.items() if key not in keys}
