"""40 streams of a real service, over HTTP with the CPU kernels, while its engine is replaced or dies: the same texts.

What is done comes at random moments of the streams; the seed is in the failing test's name. `make soak` runs the long
forms.
"""

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from benchmarks.served import serving
from tests.app.process import TINY
from tests.golden.demo_model import demo_model
from tests.integration.streams import GREEDY, Load, kill, settled, until

CARDS = ("--simulate-gpus", "2x3GiB", "--max-batch", "40", "--max-context", "1024")
TOKENS = 100


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Load]:
    with serving(tmp_path_factory.mktemp("load") / "state", "--model", str(TINY), *CARDS) as served:
        yield Load(served, TOKENS)


def reload_once(load: Load, seed: int) -> None:
    moment = load.moment(random.Random(seed))
    generation = settled(load.served)["reload"]["generation"]
    load.check(load.run((moment, load.served.reload)))
    after = settled(load.served, generation + 1)["reload"]
    assert (after["generation"], after["last"]["result"]) == (generation + 1, "ok")
    assert after["last"]["phases"]["checkpoint"] > 0


def kill_once(load: Load, seed: int) -> None:
    moment = load.moment(random.Random(seed))
    generation = settled(load.served)["reload"]["generation"]
    load.check(load.run((moment, partial(kill, load.served))))
    after = settled(load.served, generation + 1)["reload"]
    assert (after["generation"], after["last"]["reason"]) == (generation + 1, "engine_fault")


def kill_often(load: Load, seed: int) -> None:
    """Two or three deaths in one stream's life, the next one only when the engine after the last one serves."""
    rng = random.Random(seed)
    first = settled(load.served)["reload"]["generation"]
    deaths = rng.choice((2, 3))
    load.check(load.run(*((load.moment(rng), partial(kill_and_wait, load)) for _ in range(deaths))))
    assert settled(load.served)["reload"]["generation"] == first + deaths


def kill_and_wait(load: Load) -> None:
    """Returns once another engine serves: whoever asks sooner may be told of the one that is dead already."""
    generation = settled(load.served)["reload"]["generation"]
    kill(load.served)
    settled(load.served, generation + 1)


def test_undisturbed_streams_are_the_same_each_time(load: Load) -> None:
    load.check(load.run())
    assert load.served.process.poll() is None
    assert len({text for text, _ in load.twin}) > GREEDY // 2


@pytest.mark.parametrize("seed", range(8))
def test_a_graceful_reload_changes_nothing(load: Load, seed: int) -> None:
    reload_once(load, seed)


@pytest.mark.parametrize("seed", range(8))
def test_a_kill_changes_nothing(load: Load, seed: int) -> None:
    kill_once(load, seed)


@pytest.mark.parametrize("seed", range(2))
def test_two_or_three_kills_in_the_life_of_a_stream_change_nothing(load: Load, seed: int) -> None:
    kill_often(load, seed)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("disturb", "runs"), [(reload_once, 100), (kill_once, 100), (kill_often, 20)])
def test_at_length(load: Load, disturb: partial[None], runs: int) -> None:
    for seed in range(1000, 1000 + runs):
        disturb(load, seed)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_demo_model_is_told_on_too(tmp_path: Path) -> None:
    with serving(tmp_path / "state", "--model", demo_model(), *CARDS) as served:
        load = Load(served, 40)
        for seed in range(4):
            reload_once(load, seed)
            kill_once(load, seed)


def test_of_32_requests_with_a_poison_only_that_one_fails(tmp_path: Path) -> None:
    arguments = ("--model", str(TINY), *CARDS, "--faults", "poison=user:mallory")
    with serving(tmp_path / "state", *arguments) as served:
        load = Load(served, 60)
        poisoned = random.Random(5).randrange(GREEDY)
        answers = load.run(users=[None] * poisoned + ["mallory"])
        fate = answers.pop(poisoned)
        assert fate.finish is None
        assert fate.error is not None
        assert fate.error["code"] == "poison"
        del load.twin[poisoned]
        load.check(answers)
        assert 'ullage_requests_failed_total{reason="poison"} 1.0' in served.metrics()
        assert served.chat("And now?", max_tokens=4).whole


@pytest.mark.parametrize("rung", ["pools", "stack_limit", "cublas_workspace", "graph_cache", "elastic"])
def test_a_trim_in_prefill_and_in_decode_changes_nothing(load: Load, rung: str) -> None:
    settled(load.served)
    generation = load.served.vram()["reload"]["generation"]
    done: list[str] = []

    def trim() -> None:
        done.extend(result["result"] for result in load.served.trim(rung))

    in_prefill, in_decode = random.Random(rung).randrange(40), load.events // 2
    load.check(load.run((in_prefill, trim), (in_decode, trim)))
    assert len(done) == 4  # two devices, twice
    assert "failed" not in done
    assert load.served.vram()["reload"]["generation"] == generation
    until(load.served, lambda shown: shown["queue"]["running"] == 0)
