"""A plan for people, as a table in MiB, and for programs, as plain data in bytes."""

from collections.abc import Callable
from typing import Any

from engine.memory.owners import Owner
from engine.plan.arrange import CardPlan, LaterCost, Plan
from engine.plan.costs import MIB
from engine.plan.sizes import mib_down, mib_up

_LABEL = 20
_COLUMN = 12


def plan_data(plan: Plan) -> dict[str, Any]:
    """As `ullage plan --json`. `room` is what stays free; together with the driver's and others' it makes `total`."""
    return {
        "fits": plan.fits,
        "devices": [
            {
                "device": card.device,
                "total": card.total,
                "owners": {owner.value: size for owner, size in card.owners.items()},
                "reserve": card.reserve,
                "room": card.room,
                "low": card.low,
                "mend": card.mend,
            }
            for card in plan.cards
        ],
    }


def refusal(plan: Plan) -> str:
    """Why a plan that does not fit does not, with the ways out, in one line: the message of DoesNotFit."""
    assert not plan.fits
    if plan.pool_short:
        lacks = f"--kv-pool-mib does not hold one sequence of {plan.max_context} tokens"
    else:
        lacks = "; ".join(
            f"device {card.device} needs {mib_up(sum(card.owners.values()))} MiB for a context of {plan.max_context} "
            f"tokens and has {mib_down(card.total - card.reserved - card.other)}"
            for card in plan.cards
            if card.room < 0
        )
    ways = ["would fit: " + ", or ".join(plan.changes)] if plan.changes else _hopeless(plan)
    return f"{lacks}: {ways[0].strip()}"


def low_line(card: CardPlan, free: int, mend: str | None) -> str:
    """What is said of a card on which less stays `free` than is to."""
    return (
        f"device {card.device}: LOW: {mib_down(free)} MiB free with everything loaded, "
        f"{mib_up(card.reserve)} are to be: {mend}"
    )


def plan_table(plan: Plan) -> str:
    """One column a card. Needs are rounded up to MiB and room is rounded down."""
    lines = [
        f"max-context {plan.max_context}, kv {plan.kv_dtype}, {plan.kv_blocks} blocks of 64 tokens "
        f"({plan.kv_minimum_blocks} of them never given back), layers {','.join(map(str, plan.split))}",
        _line("MiB", plan, lambda card: f"device {card.device}"),
        _line("layers", plan, _layers),
        _line("total", plan, lambda card: str(mib_down(card.total))),
        _line("driver", plan, lambda card: str(mib_up(card.reserved))),
    ]
    if any(card.other for card in plan.cards):
        lines.append(_line("other processes", plan, lambda card: str(mib_up(card.other))))
    for owner in Owner:
        if any(card.owners.get(owner) for card in plan.cards):
            lines.append(_owner_line(owner, plan))
            if owner is Owner.KV_CACHE:
                lines.append(_line("  of it elastic", plan, _elastic))
    lines.append(_line("free", plan, lambda card: str(mib_down(card.room))))
    lines.append(_line("reserve", plan, lambda card: str(mib_up(card.reserve))))
    return "\n".join(lines + _verdicts(plan)) + "\n"


def _line(label: str, plan: Plan, cell: Callable[[CardPlan], str]) -> str:
    return label.ljust(_LABEL) + "".join(cell(card).rjust(_COLUMN) for card in plan.cards)


def _owner_line(owner: Owner, plan: Plan) -> str:
    return _line(owner.value, plan, lambda card: str(mib_up(card.owners[owner])))


def _layers(card: CardPlan) -> str:
    return " ".join(f"{first}-{end - 1}" for first, end in card.layers)


def _elastic(card: CardPlan) -> str:
    return str(mib_down(card.owners[Owner.KV_CACHE] - card.kv_minimum))


def _verdicts(plan: Plan) -> list[str]:
    lines = [_later(plan, plan.later)] if plan.later else []
    if not plan.fits:
        lines.append("does not fit")
        lines += [f"  device {card.device}: {mib_up(-card.room)} MiB too much" for card in plan.cards if card.room < 0]
        if plan.pool_short:
            lines.append(f"  the KV pool does not hold one sequence of {plan.max_context} tokens")
        return lines + [f"  would fit: {change}" for change in plan.changes] + _hopeless(plan)
    lines += [low_line(card, card.room, card.mend) for card in plan.cards if card.low]
    return lines + [f"  or: {change}" for change in plan.changes[1:]]


def _hopeless(plan: Plan) -> list[str]:
    return [] if plan.changes else [f"  {mend}" for mend in sorted({card.mend for card in plan.cards if card.mend})]


def _later(plan: Plan, later: LaterCost) -> str:
    lost = ", ".join(
        f"device {card.device} {_signed(-size)} MiB of KV cache"
        for card, size in zip(plan.cards, later.kv_lost, strict=True)
    )
    moved = (
        "layers stay" if later.split_before == plan.split else f"layers were {','.join(map(str, later.split_before))}"
    )
    context = "" if later.context_before == plan.max_context else f", max-context was {later.context_before}"
    return f"--vram-reserve-later-mib costs {later.blocks_lost} blocks: {lost}; {moved}{context}"


def _signed(size: int) -> str:
    return f"{round(size / MIB):+d}"
