"""Byte-level BPE from the tokens and merges of a model file."""

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from app.text.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from app.text.vocabulary import TokenKind, Vocabulary
from engine.errors import ModelFileError
from engine.gguf import GgufFile

MERGES = "tokenizer.ggml.merges"


def pre_tokenizer_of(gguf: GgufFile) -> PreTokenizer:
    """The entry for `tokenizer.ggml.pre`; old files without it are cut as "default". Raises ModelFileError."""
    name = gguf.text("tokenizer.ggml.pre", "default")
    if name not in PRE_TOKENIZERS:
        gguf.fail("tokenizer.ggml.pre", f"'{name}' is not supported; supported: {', '.join(sorted(PRE_TOKENIZERS))}")
    return PRE_TOKENIZERS[name]


def byte_level_bpe(gguf: GgufFile, vocabulary: Vocabulary, pre: PreTokenizer) -> Tokenizer:
    """Knows no special tokens: the text given to it holds none. Raises ModelFileError for broken merges."""
    hidden = vocabulary.named(TokenKind.CONTROL, TokenKind.UNKNOWN)
    vocab = {text: token for text, token in vocabulary.ids.items() if text not in hidden}
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in gguf.array(MERGES).strings())]
    try:
        bpe = models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.whole_words)
    except Exception as error:  # the package raises nothing more precise
        raise ModelFileError(gguf.path, MERGES, str(error)) from error
    tokenizer = Tokenizer(bpe)
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    return tokenizer
