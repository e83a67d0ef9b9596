"""Where each family cuts words; the expected cuts are worked out by hand from the families' rules."""

import pytest

from app.text.bpe import byte_level_bpe
from app.text.pretokenizers import PRE_TOKENIZERS
from app.text.vocabulary import Vocabulary, byte_alphabet
from engine.gguf import open_gguf
from tests.app.text.vocabularies import golden_draft

SAMPLE = "Don't pay $12345678, OK?\n\n  xDON'T"
DIGITS = [*"12345678"]
AS_LLAMA3 = ["Don", "'t", " pay", " $", "123", "456", "78", ",", " OK", "?\n\n", " ", " xDON", "'T"]
AS_QWEN = ["Don", "'t", " pay", " $", *DIGITS, ",", " OK", "?\n\n", " ", " xDON", "'T"]
AS_GPT2 = ["Don", "'t", " pay", " $", "12345678", ",", " OK", "?", "\n\n ", " xDON", "'", "T"]
AS_SMOLLM = ["Don", "'t", " pay", " $", *DIGITS, ",", " OK", "?", "\n\n ", " xDON", "'", "T"]

WORDS = {
    **dict.fromkeys(("gpt-2", "trillion"), AS_GPT2),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "smaug-bpe"), AS_LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "qwen35"), AS_QWEN),
    **dict.fromkeys(("smollm", "starcoder", "refact", "minerva-7b"), AS_SMOLLM),
    "tekken": ["Don", "'t", " pay", " $", *DIGITS, ",", " OK", "?\n\n", " ", " x", "DON", "'T"],
    "gpt-4o": ["Don't", " pay", " $", "123", "456", "78", ",", " OK", "?\n\n", " ", " x", "DON'T"],
    "default": ["Don", "'", "t", " pay", " ", "$", "123", "456", "78", ",", " OK", "?", "\n\n ", " xDON", "'", "T"],
    "deepseek-coder": ["Don", "'", "t", " pay", " $", *DIGITS, ",", " OK", "?", "\n", "\n", " ", " xDON", "'", "T"],
}


def words_of(pre: str, text: str, folder: str) -> list[str]:
    gguf = open_gguf(folder)
    model = byte_level_bpe(gguf, Vocabulary.from_gguf(gguf), PRE_TOKENIZERS[pre])
    byte_of = {character: byte for byte, character in byte_alphabet().items()}
    cut = model.pre_tokenizer.pre_tokenize_str(text)
    return [bytes(byte_of[character] for character in word).decode() for word, _ in cut]


@pytest.fixture(scope="module")
def model_file(tmp_path_factory) -> str:
    return golden_draft("qwen2").write(tmp_path_factory.mktemp("vocabulary"))


def test_every_family_has_its_expected_words():
    assert WORDS.keys() == PRE_TOKENIZERS.keys()


@pytest.mark.parametrize("pre", WORDS)
def test_words_of_a_family(pre, model_file):
    assert words_of(pre, SAMPLE, model_file) == WORDS[pre]


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("qwen2", "नमस्ते", ["नमस", "्त", "े"]),  # marks are no letters
        ("qwen35", "नमस्ते", ["नमस्ते"]),
        ("tekken", "camelCase XMLHttp", ["camel", "Case", " XMLHttp"]),
        ("gpt-4o", "we'll WE'LL", ["we'll", " WE'LL"]),
        ("qwen2", "(a) \u2003b", ["(a", ")", " ", "\u2003b"]),
        ("gpt-2", "x = 1  \n  y", ["x", " =", " 1", "  \n ", " y"]),
        ("llama-bpe", "x = 1  \n  y", ["x", " =", " ", "1", "  \n", " ", " y"]),
        ("deepseek-coder", "中文ab", ["中文", "ab"]),
        ("tekken", "a//\nb", ["a", "//\n", "b"]),
    ],
)
def test_words_where_families_differ(pre, text, words, model_file):
    assert words_of(pre, text, model_file) == words
