"""Which cards a mask leaves, as CUDA reads it, and where only CUDA could tell."""

import pytest

from watchdog.source import Card, SourceError
from watchdog.visible import by_mask, by_uuid

FOUR = tuple(
    Card(f"GPU-{letter}{letter}0{letter}", "H200", f"00000000:{bus}:00.0")
    for letter, bus in zip("abcd", ("81", "01", "41", "C1"), strict=True)
)
A, B, C, D = FOUR
MIXED = (Card("GPU-1", "RTX 5060 Ti", "00000000:01:00.0"), Card("GPU-2", "RTX 3090", "00000000:02:00.0"))
MIG = (
    Card("MIG-00", "MIG 1g", "00000000:01:00.0", "GPU-p"),
    Card("MIG-01", "MIG 1g", "00000000:01:00.0", "GPU-p"),
    Card("GPU-q", "H200", "00000000:02:00.0"),
)


@pytest.mark.parametrize(
    ("mask", "cards"),
    [
        (None, (A, B, C, D)),
        ("", ()),
        ("0", (B,)),  # by bus
        ("2,0", (A, B)),
        (" 3 , 1 ", (D, C)),
        ("1,-1,0", (C,)),  # nothing counts after an entry that names no card
        ("0,9,1", (B,)),
        ("NoDevFiles", ()),
        ("0,0", ()),
        ("GPU-cc0c,GPU-aa0a", (C, A)),
        ("GPU-d", (D,)),  # a prefix that is enough
        ("GPU-d,GPU-x,GPU-a", (D,)),
        ("GPU-a,2", ()),  # the same card twice
    ],
)
def test_masks(mask: str | None, cards: tuple[Card, ...]) -> None:
    assert by_mask(FOUR, mask) == cards


def test_a_prefix_of_two_is_refused() -> None:
    with pytest.raises(SourceError, match="more than one"):
        by_mask(FOUR, "GPU-")


def test_an_index_among_unlike_cards_needs_the_order_by_bus() -> None:
    with pytest.raises(SourceError, match="CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        by_mask(MIXED, "1")
    assert by_mask(MIXED, "1", bus_order=True) == (MIXED[1],)
    assert by_mask(MIXED, "GPU-2,GPU-1") == (MIXED[1], MIXED[0])


def test_mig_instances() -> None:
    assert by_mask(MIG, None) == (MIG[0], MIG[2]), "of a card in MIG mode CUDA shows one instance"
    assert by_mask(MIG, "MIG-01") == (MIG[1],)
    assert by_mask(MIG, "GPU-p") == (MIG[0],)
    assert by_mask(MIG, "1,0", bus_order=True) == (MIG[2], MIG[0])
    with pytest.raises(SourceError, match="nvidia-smi -L"):
        by_mask(MIG, "MIG-GPU-p/1/0")


def test_what_the_engine_names_is_found_in_its_order() -> None:
    assert by_uuid(FOUR, ["GPU-cc0c", "aa0a"]) == (C, A)
    assert by_uuid(MIG, ["mig-01"]) == (MIG[1],)
    with pytest.raises(SourceError, match="GPU-zz, which is not among H200"):
        by_uuid(FOUR, ["GPU-zz"])
