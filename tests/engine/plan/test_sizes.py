import pytest

from engine.errors import ConfigError
from engine.plan.sizes import mib_down, mib_up, parse_cards

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("16GiB", [16 * GIB]),
        ("16GiB,8GiB", [16 * GIB, 8 * GIB]),
        ("2x16GiB", [16 * GIB] * 2),
        ("1x1.5GiB, 700MiB", [3 * GIB // 2, 700 << 20]),
    ],
)
def test_sizes_of_cards(text, sizes):
    assert parse_cards(text, "--gpus") == sizes


@pytest.mark.parametrize(
    "text", ["", "16", "16GB", "16 GiB,", "x16GiB", "0x16GiB", "17x1GiB", "-1GiB", "1KiB", "9999999TiB"]
)
def test_what_is_no_size_is_named(text):
    with pytest.raises(ConfigError, match=r"--gpus"):
        parse_cards(text, "--gpus")


def test_needs_are_rounded_up_and_room_down():
    assert (mib_up((5 << 20) + 1), mib_down((6 << 20) - 1)) == (6, 5)
    assert (mib_up(-1), mib_down(-1)) == (0, -1)
