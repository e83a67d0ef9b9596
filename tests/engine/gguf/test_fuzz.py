"""Mutated files: each opens or is refused by ModelFileError, in bounded memory, and what opens can be read to the end.

The short form runs a fixed number of seeds; the long form (`slow`) runs a minute from a fresh seed, which it prints.
"""

import os
import random
import time
import tracemalloc

import pytest

from engine.errors import ModelFileError
from engine.gguf import ArrayValue, GgufFile, ValueType, open_gguf
from engine.model.config import ModelConfig
from tests.engine.gguf.building import small_draft
from tests.golden.cases import golden_cases

SHORT_FORM_FILES = 1500
LONG_FORM_SECONDS = 60
OBJECTS_PER_BYTE = 16
"""A metadata key of 13 bytes becomes three Python objects, a tensor info of 33 bytes about eight."""
FIXED_BYTES = 256 << 10
SMALL_TENSOR_BYTES = 4096
NUMBERS = (0, 1, 2, 3, 5, 9, 31, 33, 2**16, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 9, 2**64 - 1)


def sound_files() -> list[tuple[bytes, int]]:
    """Whole files with the length of their header. Mutations are aimed at the header: nothing else is parsed."""
    golden = [
        case.model.read_bytes() for case in golden_cases() if case.name in ("llama-k-IQ2_XS-s1", "llama-MXFP4-s1")
    ]
    small = small_draft()
    return [(small.image(), len(small.header()))] * 3 + [(image, 18_000) for image in golden]


def mutated(image: bytes, header: int, rng: random.Random) -> bytes:
    """One or two changes: a byte, a number, a cut, a run taken out, put in twice or overwritten with noise."""
    data = bytearray(image)
    for _ in range(rng.choice((1, 1, 2))):
        at = rng.randrange(min(header, len(data)) or 1)
        length = rng.choice((1, 4, 8, 13, rng.randrange(1, 200)))
        match rng.choice((0, 0, 0, 1, 1, 2, 2, 2, 3, 4, 5, 6)):
            case 0:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                data[at : at + 8] = rng.choice((*NUMBERS, len(data), len(data) - at)).to_bytes(8, "little")
            case 2:
                data[at : at + 4] = (rng.choice(NUMBERS) & 0xFFFFFFFF).to_bytes(4, "little")
            case 3:
                del data[at : at + length]
            case 4:
                data[at:at] = data[at : at + length]
            case 5:
                data[at : at + length] = rng.randbytes(length)
            case _:
                del data[rng.randrange(len(data) + 1) :]
    return bytes(data)


def exercise(image: bytes) -> None:
    """Open `image` and read everything in it; ModelFileError is the only way out, and memory is held to the size."""
    descriptor = os.memfd_create("fuzz")
    try:
        os.write(descriptor, image)
        tracemalloc.start()
        file = open_gguf("fuzz.gguf", descriptor)
        _, peak = tracemalloc.get_traced_memory()
        assert peak < OBJECTS_PER_BYTE * len(image) + FIXED_BYTES
        read_all(file)
        ModelConfig.from_gguf(file)
    except ModelFileError as error:
        assert str(error).startswith("fuzz.gguf: ")  # noqa: PT017  # an error is one of two right outcomes
        assert str(error).isprintable()  # noqa: PT017
    finally:
        tracemalloc.stop()
        os.close(descriptor)


def read_all(file: GgufFile) -> None:
    for value in file.metadata.values():
        if isinstance(value, ArrayValue):
            strings = value.element_type is ValueType.STRING
            assert len(value.raw_strings() if strings else value.numbers()) == value.length
    for name, info in file.tensors.items():
        assert file.tensor_bytes(name).nbytes == info.nbytes
        assert 0 < info.offset <= file.size - info.nbytes
        if info.nbytes <= SMALL_TENSOR_BYTES:
            assert file.dequantised(name).shape == info.shape


def test_mutated_files_short_form() -> None:
    files = sound_files()
    for seed in range(SHORT_FORM_FILES):
        rng = random.Random(seed)
        exercise(mutated(*files[seed % len(files)], rng))


@pytest.mark.slow
def test_mutated_files_long_form() -> None:
    files, first = sound_files(), random.SystemRandom().randrange(2**32)
    print(f"first seed {first}")  # noqa: T201  # shown by pytest when the test fails
    end, seed = time.monotonic() + LONG_FORM_SECONDS, first
    while time.monotonic() < end:
        rng = random.Random(seed)
        exercise(mutated(*files[seed % len(files)], rng))
        seed += 1


@pytest.mark.parametrize("kind", ["keys", "tensors", "strings"])
def test_a_file_of_smallest_parts_stays_in_bounds(kind: str) -> None:
    """As many objects as the bytes can hold: a name each of four bytes or less."""
    draft = small_draft()
    names = [format(number, "x") for number in range(20_000)]
    if kind == "keys":
        draft.metadata = dict.fromkeys(names, False)
    elif kind == "tensors":
        tensor = draft.tensors["a.weight"]
        tensor.shape, tensor.data = (1,), bytes(4)
        draft.tensors = dict.fromkeys(names, tensor)
    else:
        draft.metadata = {"empty": [""] * 200_000}
    exercise(draft.image())
