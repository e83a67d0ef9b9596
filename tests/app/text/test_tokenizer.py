"""Byte-level BPE: the golden ids, the package's own reading of the same vocabulary, slices, roles, broken files."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from app.demo_model import SMOLLM2
from app.text.pretokenizers import PRE_TOKENIZERS
from app.text.tokenizer import Tokenizer
from app.text.vocabulary import TokenKind, byte_alphabet
from engine.errors import ModelFileError
from engine.gguf import open_gguf
from tests.app.text.vocabularies import bpe_draft, golden_draft, metadata_without, tokenizer_of
from tests.engine.gguf.building import Draft
from tests.golden.cases import golden_cases, golden_dir

FAMILIES = ("smollm", "qwen2", "qwen35")

# Letters of several scripts with and without case, combining marks, digits, all kinds of spaces and of punctuation.
ALPHABET = (
    "abXY'sé\u0301\u0327ǅßд日の글ᄒ\u1161ैक01²٣ \t\n\r\u00a0\u2003.,!?#$+<=>^|~`_-/()[]{}\"*\\、。😀\u200d\x00\x7f"
)
texts = st.text(alphabet=ALPHABET, max_size=60)


def cases_of(name: str) -> dict[str, Any]:
    cases: dict[str, Any] = json.loads((golden_dir() / "tokenizer" / f"cases-{name}.json").read_text(encoding="utf-8"))
    return cases


def check_ids(tokenizer: Tokenizer, cases: dict[str, Any]) -> None:
    """`tokenizers_ids` brings text to NFC where the family's own tokenizer does; so do we."""
    for case in cases["cases"]:
        assert tokenizer.encode(case["text"], parse_special=True) == case["tokenizers_ids"], case["text"]
        plain = tokenizer.encode(case["text"], parse_special=False)
        assert plain == case["tokenizers_ids_specials_as_text"], case["text"]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory) -> tuple[str, Tokenizer]:
    return request.param, tokenizer_of(golden_draft(request.param), tmp_path_factory.mktemp("vocabulary"))


def test_golden_ids_and_bytes(family):
    name, tokenizer = family
    cases = cases_of(name)
    check_ids(tokenizer, cases)
    assert [data.hex() for data in tokenizer.token_bytes] == cases["token_bytes_hex"]


def test_the_golden_model_files_carry_the_same_vocabularies():
    for case in golden_cases():
        tokenizer = Tokenizer.from_gguf(open_gguf(str(case.model)))
        check_ids(tokenizer, cases_of(case.manifest["tokenizer_pre"]))


def test_golden_ids_of_the_demo_model():
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    model = cache / "ullage" / "models" / Path(SMOLLM2.member).name
    if not model.exists():
        pytest.skip("the demo model has not been fetched")
    check_ids(Tokenizer.from_gguf(open_gguf(str(model))), cases_of("smollm2-135m"))


@settings(max_examples=150, deadline=None)
@given(texts)
def test_ids_are_those_of_the_familys_own_file(family, text):
    name, tokenizer = family
    oracle = tokenizers.Tokenizer.from_file(str(golden_dir() / "tokenizer" / f"tokenizer-{name}.json"))
    assert tokenizer.encode(text, parse_special=True) == oracle.encode(text, add_special_tokens=False).ids


@settings(max_examples=100, deadline=None)
@given(texts)
def test_the_bytes_of_the_ids_are_the_text(family, text):
    name, tokenizer = family
    if PRE_TOKENIZERS[name].nfc:
        text = tokenizers.normalizers.NFC().normalize_str(text)
    ids = tokenizer.encode(text, parse_special=True)
    assert b"".join(tokenizer.token_bytes[token] for token in ids) == text.encode()


# slices


@pytest.fixture(scope="module")
def every_pre_tokenizer(tmp_path_factory) -> list[Tokenizer]:
    folder = tmp_path_factory.mktemp("vocabulary")
    return [tokenizer_of(golden_draft("qwen2", pre), folder) for pre in PRE_TOKENIZERS]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(texts | st.sampled_from([" the", "<think>", "<|im_end|>", "ing of", "  \n\n"]), max_size=6).map("".join)
)
def test_sliced_ids_are_the_unsliced_ones(every_pre_tokenizer, text):
    for tokenizer in every_pre_tokenizer:
        whole = tokenizer.encode(text, parse_special=True, slice_chars=1 << 30)
        assert tokenizer.encode(text, parse_special=True, slice_chars=1) == whole


def test_a_long_text_is_sliced_and_the_same(family):
    _, tokenizer = family
    text = "The cat isn't on the mat (yet): 1,234 times.\n\n    x = y[0]\n" * 1500 + "日本語、" * 3000 + "a" * 70_000
    whole = tokenizer.encode(text, parse_special=False, slice_chars=1 << 30)
    assert tokenizer.encode(text, parse_special=False) == whole
    assert len(whole) > 100_000


def test_a_limit_ends_the_work_early(family):
    _, tokenizer = family
    text = "the cat. " * 20_000
    whole = tokenizer.encode(text, parse_special=False)
    some = tokenizer.encode(text, parse_special=False, limit=100)
    assert 100 < len(some) < len(whole) // 2
    assert whole[: len(some)] == some
    assert tokenizer.encode(text, parse_special=False, limit=len(whole)) == whole


def test_threads_share_a_tokenizer(family):
    _, tokenizer = family
    expected = [tokenizer.encode(f"text {n} of many", parse_special=False) for n in range(200)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: tokenizer.encode(f"text {n} of many", parse_special=False), range(200)))
    assert found == expected


# roles of tokens


def roles_draft(pre: str = "gpt-2", **metadata: Any) -> Draft:
    """The byte alphabet, then control tokens 256.., a user-defined and an unused one."""
    kinds = {
        "<s>": TokenKind.CONTROL,
        "</s>": TokenKind.CONTROL,
        "<|im_end|>": TokenKind.CONTROL,
        "<|eot_id|>": TokenKind.NORMAL,
        "<turn>": TokenKind.CONTROL,
        "<think>": TokenKind.USER_DEFINED,
        "[PAD]": TokenKind.UNUSED,
        "ab": TokenKind.NORMAL,
        "abc": TokenKind.NORMAL,
    }
    texts = [*byte_alphabet().values(), *kinds]
    draft = bpe_draft(texts, ["a b"], [*[TokenKind.NORMAL] * 256, *kinds.values()], pre)
    draft.metadata |= {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    return draft


def test_stop_ids_are_those_named_by_id_and_well_known_control_tokens(tmp_path):
    assert tokenizer_of(roles_draft(), tmp_path).stop_ids == (258,)
    named = roles_draft(eos_token_id=257, eot_token_id=260, eom_token_id=259)
    assert tokenizer_of(named, tmp_path).stop_ids == (257, 258, 259, 260)


def test_roles_and_names(tmp_path):
    tokenizer = tokenizer_of(roles_draft(bos_token_id=256, eos_token_id=257), tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (256, 257)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    assert (tokenizer.add_bos, tokenizer.add_eos, tokenizer.adds_space) == (False, False, False)
    assert tokenizer.vocab_size == len(tokenizer.token_bytes) == len(tokenizer.text_bytes) == 265
    bare = tokenizer_of(roles_draft(), tmp_path)
    assert (bare.bos_id, bare.bos_token, bare.eos_token) == (None, None, None)


def test_only_control_and_unused_tokens_add_nothing_to_an_answer(tmp_path):
    tokenizer = tokenizer_of(roles_draft(), tmp_path)
    silent = [token for token in range(tokenizer.vocab_size) if tokenizer.text_bytes[token] == b""]
    assert silent == [256, 257, 258, 260, 262]
    assert [tokenizer.is_control(token) for token in (256, 261, 262, 263)] == [True, False, True, False]
    assert tokenizer.token_bytes[256] == b"<s>"
    assert tokenizer.text_bytes[261] == b"<think>"


def test_specials_are_read_or_left_as_text(tmp_path):
    tokenizer = tokenizer_of(roles_draft(), tmp_path)
    control = [token for token in tokenizer.encode("a</s><think>b", parse_special=True) if token > 255]
    assert control == [257, 261]
    plain = tokenizer.encode("a</s><think>b", parse_special=False)
    assert [token for token in plain if token > 255] == [261]
    assert b"".join(tokenizer.token_bytes[token] for token in plain) == b"a</s><think>b"


def test_bos_is_put_in_front_once(tmp_path):
    tokenizer = tokenizer_of(roles_draft(bos_token_id=256, add_bos_token=True), tmp_path)
    assert tokenizer.add_bos
    ids = tokenizer.encode("ab", parse_special=True, add_bos=True)
    assert ids[0] == 256
    assert tokenizer.encode("<s>ab", parse_special=True, add_bos=True) == ids
    assert tokenizer.encode("", parse_special=True, add_bos=True) == [256]
    assert tokenizer.encode("ab", parse_special=True) == ids[1:]


def test_llama3_adds_bos_and_takes_whole_words_unless_the_file_says_otherwise(tmp_path):
    """ "abc" is a token that no merge makes: Llama 3 takes it as it stands, the same vocabulary elsewhere does not."""
    llama3 = tokenizer_of(roles_draft("llama-bpe", bos_token_id=256), tmp_path)
    assert llama3.add_bos
    assert llama3.encode("abc", parse_special=False) == [264]
    assert not tokenizer_of(roles_draft("llama-bpe", bos_token_id=256, add_bos_token=False), tmp_path).add_bos
    other = tokenizer_of(roles_draft("smaug-bpe"), tmp_path)
    assert [other.token_bytes[token] for token in other.encode("abc", parse_special=False)] == [b"ab", b"c"]


def test_a_file_without_pre_tokenizer_and_token_types_is_served(tmp_path):
    draft = roles_draft("default")
    expected = tokenizer_of(draft, tmp_path).encode("ab $12!", parse_special=False)
    draft.metadata = metadata_without(draft, "tokenizer.ggml.pre", "tokenizer.ggml.token_type")
    tokenizer = tokenizer_of(draft, tmp_path)
    assert tokenizer.encode("ab $12!", parse_special=False) == expected
    assert tokenizer.specials == {}


@pytest.mark.parametrize(
    ("metadata", "field", "problem"),
    [
        ({"model": "bert"}, "model", "'bert' is not supported; supported: gpt2, llama"),
        ({"pre": "bloom"}, "pre", "'bloom' is not supported; supported: deepseek-coder, "),
        ({"tokens": ["a", "b", "a"]}, "tokens", "'a' is there twice"),
        ({"tokens": [1, 2]}, "tokens", "array of numbers"),
        ({"token_type": [1, 1]}, "token_type", "has 2 entries for 265 tokens"),
        ({"merges": ["a zz"]}, "merges", "zz"),
        ({"merges": ["ab"]}, "merges", "BPE"),
        ({"bos_token_id": 265}, "bos_token_id", "265 is outside the vocabulary of 265 tokens"),
        ({"eot_token_id": 9999}, "eot_token_id", "9999 is outside"),
        ({"add_bos_token": "yes"}, "add_bos_token", "expected true or false"),
    ],
)
def test_a_broken_file_is_refused_by_field(metadata, field, problem, tmp_path):
    with pytest.raises(ModelFileError) as caught:
        tokenizer_of(roles_draft(**metadata), tmp_path)
    assert f"model.gguf: tokenizer.ggml.{field}: " in str(caught.value)
    assert problem in str(caught.value)


@pytest.mark.parametrize("missing", ["model", "tokens", "merges"])
def test_a_missing_field_is_named(missing, tmp_path):
    draft = roles_draft()
    draft.metadata = metadata_without(draft, f"tokenizer.ggml.{missing}")
    with pytest.raises(ModelFileError, match=f"tokenizer.ggml.{missing}: this metadata key is missing"):
        tokenizer_of(draft, tmp_path)


def test_special_tokens_that_nest_without_end_are_refused(tmp_path):
    texts = [*byte_alphabet().values(), "ab", *("<" * n for n in range(2, 3000))]
    kinds = [*[TokenKind.NORMAL] * 257, *[TokenKind.CONTROL] * 2998]
    with pytest.raises(ModelFileError, match=r"tokenizer.ggml.tokens: special tokens begin with one another"):
        tokenizer_of(bpe_draft(texts, ["a b"], kinds, "gpt-2"), tmp_path)
