"""From what the engine may see to the cards of the source: by UUID, or by a mask as CUDA_VISIBLE_DEVICES is written.

CUDA and NVML count devices differently: CUDA puts the fastest first unless CUDA_DEVICE_ORDER=PCI_BUS_ID, and counts
only what its mask leaves; NVML goes by bus. An index is therefore taken only where it can mean one card.
"""

from collections.abc import Sequence

from watchdog.source import Card, SourceError


def by_uuid(cards: Sequence[Card], uuids: Sequence[str]) -> tuple[Card, ...]:
    """The cards that the engine named, in its order. Raises SourceError for one that the source does not know."""
    known = {_bare(card.uuid): card for card in cards}
    for uuid in uuids:
        if _bare(uuid) not in known:
            raise SourceError(f"the engine uses device {uuid}, which is not among {_names(cards)}")
    return tuple(known[_bare(uuid)] for uuid in uuids)


def by_mask(cards: Sequence[Card], mask: str | None, *, bus_order: bool = False) -> tuple[Card, ...]:
    """What CUDA would show under CUDA_VISIBLE_DEVICES=`mask`, in its order; None is an unset mask.

    As CUDA does, everything after the first entry that names no card is left out, and an entry twice leaves nothing.
    `bus_order` says that CUDA_DEVICE_ORDER=PCI_BUS_ID. Raises SourceError where only CUDA could tell which is meant.
    """
    if mask is None:
        return _first_instances(cards)
    chosen: list[Card] = []
    for entry in (part.strip() for part in mask.split(",")):
        found = _entry(cards, entry, bus_order)
        if found is None:
            break
        if found in chosen:
            return ()
        chosen.append(found)
    return tuple(chosen)


def _entry(cards: Sequence[Card], entry: str, bus_order: bool) -> Card | None:
    if entry.isdecimal():
        return _by_index(cards, int(entry), bus_order)
    if entry.startswith("MIG-GPU-"):  # of drivers before R470: parent and instance numbers, which NVML cannot look up
        raise SourceError(f"{entry}: name a MIG instance by its own UUID (nvidia-smi -L)")
    if not entry.startswith(("GPU-", "MIG-")):
        return None
    if entry.startswith("GPU-"):
        cards = _first_instances(cards)
        found = [card for card in cards if (card.parent or card.uuid).startswith(entry)]
    else:
        found = [card for card in cards if card.uuid.startswith(entry)]
    if len(found) > 1:
        raise SourceError(f"{entry}: is the beginning of more than one UUID")
    return found[0] if found else None


def _by_index(cards: Sequence[Card], index: int, bus_order: bool) -> Card | None:
    """An index counts physical GPUs; one in MIG mode stands for its first instance."""
    physical = _first_instances(cards)
    if not bus_order and len({card.name for card in physical}) > 1:
        raise SourceError(
            f"device {index} of {_names(physical)}: CUDA puts the fastest first; "
            "set CUDA_DEVICE_ORDER=PCI_BUS_ID or name devices by UUID"
        )
    ordered = sorted(physical, key=lambda card: card.bus_id or "")
    return ordered[index] if index < len(ordered) else None


def _first_instances(cards: Sequence[Card]) -> tuple[Card, ...]:
    """CUDA shows whole GPUs, and of one in MIG mode its first instance."""
    seen: dict[str, Card] = {}
    for card in cards:
        seen.setdefault(card.parent or card.uuid, card)
    return tuple(seen.values())


def _bare(uuid: str) -> str:
    return uuid.removeprefix("GPU-").lower()


def _names(cards: Sequence[Card]) -> str:
    return ", ".join(f"{card.name} ({card.uuid})" for card in cards)
