"""SentencePiece style: merging by score against the rule written down, byte tokens, spaces."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.text.tokenizer import Tokenizer
from app.text.vocabulary import TokenKind
from engine.errors import ModelFileError
from tests.app.text.vocabularies import (
    BYTE_TOKENS,
    metadata_without,
    spm_draft,
    spm_reference,
    tokenizer_of,
    trained_spm,
)

WORDS = ["the", "then", "there", "other", "bother", "", "", "-", "--", "----", "aaa", "aaaaaa", "banana", "bandana"]
SAMPLE = [word for word in WORDS for _ in range(1 + len(word) % 3)]
texts = st.text(alphabet="▁abehnort-é😀", max_size=40)


def tokens_of(tokenizer: Tokenizer, draft_tokens: list[str], text: str) -> list[str]:
    return [draft_tokens[token] for token in tokenizer.encode(text, parse_special=False)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    scored = trained_spm(SAMPLE, 60)
    draft = spm_draft(scored)
    draft.metadata["tokenizer.ggml.add_space_prefix"] = False
    return scored, draft.metadata["tokenizer.ggml.tokens"], tokenizer_of(draft, tmp_path_factory.mktemp("spm"))


@settings(max_examples=300, deadline=None)
@given(texts)
def test_a_trained_vocabulary_merges_as_the_rule_says(trained, text):
    scored, tokens, tokenizer = trained
    assert tokens_of(tokenizer, tokens, text.replace("▁", " ")) == spm_reference(text, scored)


@pytest.mark.parametrize("seed", range(20))
def test_random_scores_merge_as_the_rule_says(seed, tmp_path):
    """Scores that no training gives: tokens better than their parts, many ways to build one; each score once."""
    rng = random.Random(seed)
    tokens = set("▁ab")
    while len(tokens) < 30:
        tokens.add("▁" * rng.choice([0, 0, 1, 3]) + "".join(rng.choices("aab", k=rng.randint(1, 6))))
    scores = rng.sample(range(1000), len(tokens))
    scored = dict(zip(sorted(tokens), map(float, scores), strict=True))
    draft = spm_draft(scored)
    draft.metadata["tokenizer.ggml.add_space_prefix"] = False
    tokenizer = tokenizer_of(draft, tmp_path)
    for _ in range(50):
        text = "".join(rng.choices(["▁", "a", "aaa", "b", "ab", "é"], k=rng.randint(1, 15)))
        found = tokens_of(tokenizer, draft.metadata["tokenizer.ggml.tokens"], text.replace("▁", " "))
        assert found == spm_reference(text, scored), text


def test_tied_runs_grow_from_the_left(tmp_path):
    """Gemma's runs of spaces all score 0: the leftmost rule makes the longest run first."""
    scored = {"▁" * n: 0.0 for n in range(1, 8)} | {"a": -1.0}
    draft = spm_draft(scored)
    draft.metadata["tokenizer.ggml.add_space_prefix"] = False
    tokenizer = tokenizer_of(draft, tmp_path)
    for spaces in range(1, 25):
        text = "a" + "▁" * spaces + "a"
        found = tokens_of(tokenizer, draft.metadata["tokenizer.ggml.tokens"], text.replace("▁", " "))
        assert found == spm_reference(text, scored)


def test_a_token_over_a_words_end_is_found(tmp_path):
    scored = {"a": 0.0, "b": 0.0, "▁": 0.0, "a▁": -1.0, "a▁b": -2.0}
    draft = spm_draft(scored)
    draft.metadata["tokenizer.ggml.add_space_prefix"] = False
    tokenizer = tokenizer_of(draft, tmp_path)
    assert tokens_of(tokenizer, draft.metadata["tokenizer.ggml.tokens"], "ba bb") == ["b", "a▁b", "b"]
    long = "ab a b " * 10
    whole = tokenizer.encode(long, parse_special=False)
    assert tokenizer.encode(long, parse_special=False, slice_chars=1) == whole


@settings(max_examples=100, deadline=None)
@given(texts)
def test_sliced_ids_are_the_unsliced_ones(trained, text):
    *_, tokenizer = trained
    text = text.replace("▁", " ")
    whole = tokenizer.encode(text, parse_special=True, slice_chars=1 << 30)
    assert tokenizer.encode(text, parse_special=True, slice_chars=1) == whole


@pytest.fixture
def spaced(tmp_path) -> tuple[list[str], Tokenizer]:
    draft = spm_draft({"▁": 0.0, "a": 0.0, "▁a": -1.0, "▁▁": -2.0}, {"<tool>": TokenKind.USER_DEFINED})
    return draft.metadata["tokenizer.ggml.tokens"], tokenizer_of(draft, tmp_path)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("a", ["▁a"]),
        ("a a", ["▁a", "▁a"]),
        (" a", ["▁", "▁a"]),
        ("", []),
        ("<s>a", ["<s>", "▁a"]),  # a space before the first word after every special token, as llama.cpp does
        ("a<tool>a", ["▁a", "<tool>", "▁a"]),
        ("a\n", ["▁a", "<0x0A>"]),
        ("é", ["▁", "<0xC3>", "<0xA9>"]),
        ("<0x41>", ["▁", "<0x3C>", "<0x30>", "<0x78>", "<0x34>", "<0x31>", "<0x3E>"]),
    ],
)
def test_spaces_specials_and_bytes(spaced, text, tokens):
    names, tokenizer = spaced
    assert [names[token] for token in tokenizer.encode(text, parse_special=True)] == tokens


def test_control_tokens_in_plain_text_are_never_made_by_merging(tmp_path):
    scored = {"<": -1.0, "s": -2.0, ">": -3.0, "<s": -4.0, "▁": -5.0}
    tokenizer = tokenizer_of(spm_draft(scored), tmp_path)
    assert tokenizer.bos_id not in tokenizer.encode("<s>", parse_special=False)
    assert tokenizer.bos_id in tokenizer.encode("<s>", parse_special=True)


def test_bytes_of_every_token(spaced):
    names, tokenizer = spaced
    assert [tokenizer.token_bytes[names.index(token)] for token in BYTE_TOKENS] == [bytes([n]) for n in range(256)]
    assert tokenizer.token_bytes[names.index("▁a")] == b" a"
    assert tokenizer.token_bytes[names.index("▁▁")] == b"  "
    assert tokenizer.token_bytes[names.index("<tool>")] == tokenizer.text_bytes[names.index("<tool>")] == b"<tool>"
    assert (tokenizer.token_bytes[1], tokenizer.text_bytes[1]) == (b"<s>", b"")


def test_roles_default_to_sentencepieces(spaced):
    _, tokenizer = spaced
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.stop_ids) == (1, 2, (2,))
    assert (tokenizer.add_bos, tokenizer.add_eos, tokenizer.adds_space) == (True, False, True)
    assert tokenizer.encode("a", parse_special=False, add_bos=True)[0] == 1


@pytest.mark.parametrize(
    ("scores", "problem"), [([0.0], "has 1 entries for 260 tokens"), ([float("nan")] * 260, "NaN or infinity")]
)
def test_broken_scores_are_refused(scores, problem, tmp_path):
    draft = spm_draft({"a": 0.0})
    draft.metadata["tokenizer.ggml.scores"] = scores
    with pytest.raises(ModelFileError, match=f"tokenizer.ggml.scores: .*{problem}"):
        tokenizer_of(draft, tmp_path)


def test_missing_scores_are_named(tmp_path):
    draft = spm_draft({"a": 0.0})
    draft.metadata = metadata_without(draft, "tokenizer.ggml.scores")
    with pytest.raises(ModelFileError, match=r"tokenizer.ggml.scores: this metadata key is missing"):
        tokenizer_of(draft, tmp_path)
