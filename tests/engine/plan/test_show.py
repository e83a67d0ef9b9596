"""The plan as it is printed, on a case like the report that started this: two cards of 16 GiB, a mixture of experts."""

import json
import re
from dataclasses import replace

import pytest

from engine.plan import Ask, Card, Demand, plan_cards
from engine.plan.costs import MIB
from engine.plan.show import plan_data, plan_table, refusal

GIB = 1 << 30


def mixture():
    """48 layers of 396 MiB, 4 KV heads of 128: 18.6 GiB of weights, and a context of 262,144 tokens."""
    return Demand(
        layer_weights=(396 * MIB,) * 48,
        embedding=330 * MIB,
        head=400 * MIB,
        kv_heads=4,
        head_dim=128,
        trained_context=262_144,
        row_scratch=120_000,
        logit_scratch=40 * MIB,
    )


def ask(**changes):
    cards = tuple(Card.empty(device, 16 * GIB) for device in range(2))
    return replace(Ask(cards=cards, kv_dtype="int8", reserve_mib=(700,)), **changes)


def figures(table, label):
    [line] = [line for line in table.splitlines() if line.startswith(label)]
    return [int(figure) for figure in line.removeprefix(label).split()]


def test_a_low_later_card_is_told_the_exact_flag():
    plan = plan_cards(mixture(), ask(layer_split=(23, 25), max_context=147_456))
    table = plan_table(plan)
    assert plan.fits
    assert [card.low for card in plan.cards] == [False, True]
    free = plan.cards[1].room // MIB
    assert f"device 1: LOW: {free} MiB free with everything loaded, 700 are to be: --layer-split 24,24\n" in table
    assert plan_cards(mixture(), ask(layer_split=(24, 24), max_context=147_456)).sound
    [second] = re.findall(r"^  or: (.*)$", table, re.M)
    context = int(second.removeprefix("--max-context "))
    assert plan_cards(mixture(), ask(layer_split=(23, 25), max_context=context)).sound
    assert not plan_cards(mixture(), ask(layer_split=(23, 25), max_context=context + 64)).sound


def test_the_columns_add_up_to_the_card():
    plan = plan_cards(mixture(), ask(max_context=65_536))
    table = plan_table(plan)
    labels = (
        "driver",
        "context",
        "modules",
        "weights",
        "kv_cache",
        "scratch",
        "cublas_workspace",
        "cuda_graphs",
        "free",
    )
    columns = zip(*(figures(table, label) for label in labels), strict=True)
    for total, column in zip(figures(table, "total"), columns, strict=True):
        assert total <= sum(column) < total + len(labels)
    assert figures(table, "reserve") == [700, 700]
    assert all(free >= 700 for free in figures(table, "free"))
    assert "layers                      0-23       24-47" in table
    assert "LOW" not in table
    assert "  of it elastic" in table


def test_the_price_of_a_later_reserve_is_printed_for_each_card():
    plan = plan_cards(mixture(), ask(max_context=65_536, reserve_later_mib=1265))
    before = plan_cards(mixture(), ask(max_context=65_536))
    line = plan_table(plan).splitlines()[-1]
    lost = [old.owners["kv_cache"] - new.owners["kv_cache"] for old, new in zip(before.cards, plan.cards, strict=True)]
    assert all(size > 0 for size in lost)
    assert line == (
        f"--vram-reserve-later-mib costs {before.kv_blocks - plan.kv_blocks} blocks: "
        f"device 0 -{round(lost[0] / MIB)} MiB of KV cache, device 1 -{round(lost[1] / MIB)} MiB of KV cache; "
        "layers stay"
    )
    assert plan.cards[1].room >= 1265 * MIB


def test_a_refusal_lists_the_lack_and_two_ways_out():
    plan = plan_cards(mixture(), ask(max_context=262_144, kv_dtype="f16"))
    table = plan_table(plan)
    assert not plan.fits
    assert len(plan.changes) == 2
    for change in plan.changes:
        assert f"  would fit: {change}\n" in table
    for card in plan.cards:
        assert f"  device {card.device}: {-(card.room >> 20)} MiB too much\n" in table


def test_a_pool_too_small_and_a_model_too_large_say_so():
    short = plan_table(plan_cards(mixture(), ask(max_context=65_536, kv_pool_mib=100)))
    assert "  the KV pool does not hold one sequence of 65536 tokens\n" in short
    small = tuple(Card.empty(device, 8 * GIB) for device in range(2))
    assert "  a smaller model or quantisation: device 1 lacks" in plan_table(plan_cards(mixture(), ask(cards=small)))


@pytest.mark.parametrize(
    "changes",
    [
        {"max_context": 262_144, "kv_dtype": "f16"},
        {"max_context": 65_536, "kv_pool_mib": 100},
        {"cards": tuple(Card.empty(device, 8 * GIB) for device in range(2))},
    ],
)
def test_a_refusal_is_one_line_with_figures_and_ways_out(changes):
    plan = plan_cards(mixture(), ask(**changes))
    line = refusal(plan)
    assert "\n" not in line
    assert str(plan.max_context) in line
    assert all(change in line for change in plan.changes)
    assert plan.changes or "smaller model" in line
    for card in plan.cards:
        if card.room < 0:
            assert f"device {card.device} needs " in line
            assert f"and has {(card.total - card.reserved) >> 20}" in line


def test_other_processes_have_a_line_of_their_own():
    cards = (Card(0, 16 * GIB, 615 * MIB, 15 * GIB - 615 * MIB), Card.empty(1, 16 * GIB))
    table = plan_table(plan_cards(mixture(), ask(cards=cards, max_context=1024)))
    assert figures(table, "other processes") == [1024, 0]


@pytest.mark.parametrize("context", [262_144, 147_456, 1024])
def test_data_for_programs(context):
    plan = plan_cards(mixture(), ask(layer_split=(23, 25), max_context=context))
    data = json.loads(json.dumps(plan_data(plan)))
    assert data.keys() == {"fits", "devices"}
    assert data["fits"] is plan.fits
    for device, card in zip(data["devices"], plan.cards, strict=True):
        assert device.keys() == {"device", "total", "owners", "reserve", "room", "low", "mend"}
        assert all(type(device[key]) is int for key in ("device", "total", "reserve", "room"))
        assert all(type(size) is int for size in device["owners"].values())
        assert device["total"] == card.reserved + card.other + sum(device["owners"].values()) + device["room"]
        assert device["low"] is (device["room"] < device["reserve"])
        assert device["mend"] is None if not device["low"] else isinstance(device["mend"], str)
