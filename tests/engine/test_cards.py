"""The CPU backend on simulated cards: what is charged, what is refused, and that stages change no token."""

import pytest

from engine.backend import load_host
from engine.cards import load_cards
from engine.errors import ConfigError, DoesNotFit, OutOfMemory
from engine.load import load_backend
from engine.messages import Grow, Trim
from engine.plan import Ask, Card, file_demand, plan_cards
from tests.engine.cards import MIB, MODEL, config_on, parsed, simulated
from tests.golden.running import greedy

PROMPTS = [[3, 1, 4], list(range(70)), [9] * 130]


def quiet(phase, done, total): ...


@pytest.fixture(scope="module")
def model():
    return parsed()


@pytest.mark.parametrize("kv_dtype", ["f32", "f16", "int8"])
def test_stages_change_no_token(kv_dtype, model, tmp_path):
    host = load_host(config_on(tmp_path, kv_dtype=kv_dtype, simulated_gpus=None), model, quiet)
    expected = greedy(host.pipeline, PROMPTS, 20)
    for devices, stages in {(): 2, (0,): 1, (0, 0): 2, (1, 0, 1): 3}.items():
        folder = tmp_path / f"cards{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        simulated(folder, 2048, 2048)
        backend = load_cards(config_on(folder, kv_dtype=kv_dtype, devices=devices), model, quiet)
        assert len(backend.layer_split) == stages
        assert greedy(backend.pipeline, PROMPTS, 20) == expected
        if devices == (1, 0, 1):
            assert [ready.stages for ready in backend.devices] == [[0, 2], [1]]


def test_what_is_held_is_what_was_planned(model, tmp_path, capfd):
    gpus = simulated(tmp_path, 2048, 1900)
    config = config_on(tmp_path, layer_split=(1, 2))
    backend = load_cards(config, model, quiet)
    assert backend.layer_split == [1, 2]
    plan = plan_cards(
        file_demand(model.gguf, max_batch=4),
        Ask(
            cards=(Card.empty(0, 2048 * MIB), Card.empty(1, 1900 * MIB)),
            kv_dtype="f32",
            max_batch=4,
            prefill_rows=512,
            layer_split=(1, 2),
        ),
    )
    for ready, card in zip(backend.devices, plan.cards, strict=True):
        assert ready.ledger == {str(owner): size for owner, size in card.owners.items()}
        assert gpus.free(card.device) == card.room
        assert (ready.uuid, ready.name) == (f"SIMULATED-{card.device}", f"simulated {card.total // MIB} MiB")
        assert (ready.total, ready.reserve) == (card.total, card.reserve)
        assert ready.stages == [card.device]
        assert ready.elastic_bytes == ready.elastic_plan_bytes == ready.ledger["kv_cache"] - card.kv_minimum
        assert ready.largest_late_bytes == card.largest_late
    assert backend.pool.n_blocks == plan.kv_blocks
    assert backend.max_context == plan.max_context
    assert capfd.readouterr().err == ""


def test_a_low_card_is_said_with_its_mend(model, tmp_path, capfd):
    simulated(tmp_path, 2048)
    load_cards(config_on(tmp_path, vram_reserve_mib=(1000,)), model, quiet)
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith("device 0: LOW: ")
    assert "1000 are to be: --vram-reserve-mib" in line


def test_a_card_that_came_out_fuller_than_planned_is_said(model, tmp_path, capfd):
    gpus = simulated(tmp_path, 2048, 2048)

    def intrude(phase, done, total):
        if phase == "kernels":
            gpus.resize(1, "somebody", 200 * MIB)

    backend = load_cards(config_on(tmp_path), model, intrude)
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith("device 1: LOW: ")
    assert "--vram-reserve-later-mib" in line
    backend.ladder.trim(Trim(1, "elastic", 1))
    before = gpus.free(1)
    backend.ladder.grow(Grow(1))
    assert gpus.free(1) < before


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"max_context": 2000}, ConfigError, "the model was trained for 1024"),
        ({"layer_split": (2, 2)}, ConfigError, "makes 4 layers, the model has 3"),
        ({"devices": (0, 2)}, ConfigError, "--devices 0,2: there are 2 cards, from 0 on"),
        ({"devices": (0, 0, 1, 1)}, ConfigError, "4 stages for a model of 3 layers"),
        ({"vram_reserve_mib": (1, 2, 3)}, ConfigError, "3 figures for 2 cards"),
        ({"vram_reserve_mib": (4000,)}, ConfigError, "device 0 has 1400 MiB in all"),
        ({"kv_pool_mib": 1}, DoesNotFit, "would fit: "),
        ({}, None, ""),
    ],
)
def test_refusals_come_before_anything_is_charged(settings, error, words, model, tmp_path):
    gpus = simulated(tmp_path, 1400, 1400)
    if error is None:
        load_backend(config_on(tmp_path), model, quiet)
        return
    with pytest.raises(error) as caught:
        load_backend(config_on(tmp_path, **settings), model, quiet)
    assert words in str(caught.value)
    assert gpus.rows() == []


def test_no_room_is_refused_in_one_line_with_two_ways_out(model, tmp_path):
    gpus = simulated(tmp_path, 1280, 1280)
    with pytest.raises(DoesNotFit) as caught:
        load_backend(config_on(tmp_path, vram_reserve_mib=(0,), kv_pool_mib=200), model, quiet)
    message = str(caught.value)
    assert message.startswith(f"{MODEL}: device 0 needs ")
    assert "\n" not in message
    assert gpus.rows() == []


def test_somebody_quicker_ends_the_load(model, tmp_path):
    gpus = simulated(tmp_path, 2048, 2048)

    def intrude(phase, done, total):
        if phase == "context":
            gpus.take(1, "somebody", 2000 * MIB)

    with pytest.raises(OutOfMemory, match="device 1: context asked for"):
        load_cards(config_on(tmp_path), model, intrude)


def test_fewer_graphs_are_said(model, tmp_path):
    simulated(tmp_path, 2048)
    backend = load_cards(config_on(tmp_path, without=("shadow", "graph buckets")), model, quiet)
    assert backend.dropped == ["graph buckets"]


def test_a_prompt_fills_the_pool_of_every_card_once(model, tmp_path):
    gpus = simulated(tmp_path, 2048, 2048)
    backend = load_cards(config_on(tmp_path), model, quiet)
    before = [gpus.free(device) for device in (0, 1)]
    for _ in range(3):
        greedy(backend.pipeline, PROMPTS, 2)
    assert [before[device] - gpus.free(device) for device in (0, 1)] == [2 * MIB, 2 * MIB]
    backend.ladder.trim(Trim(1, "pools"))
    assert [gpus.free(device) for device in (0, 1)] == before


def test_a_full_card_refuses_a_step_and_the_ladder_makes_room(model, tmp_path):
    gpus = simulated(tmp_path, 2048, 2048)
    backend = load_cards(config_on(tmp_path), model, quiet)
    gpus.take(1, "somebody", 4096 * MIB)
    with pytest.raises(OutOfMemory, match="device 1: pool_cached asked for 2097152 bytes, 0 are free") as caught:
        greedy(backend.pipeline, PROMPTS[:1], 1)
    assert backend.pipeline.in_flight == 0
    assert backend.ladder.relieve(caught.value.device)
    assert len(greedy(backend.pipeline, PROMPTS[:1], 1)[0]) == 1
