import pytest

from engine.errors import ConfigError
from engine.faults import FORMS, Crash, Foreign, Hang, Leak, MemoryShort, NvmlLoss, Poison, parse_faults

MIB = 1 << 20


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("leak=4MiB/request@1", Leak(4 * MIB, 1)),
        ("leak=0.5GiB/request@0", Leak(512 * MIB, 0)),
        ("crash=after:40tokens", Crash(40, False)),
        ("crash=after:1tokens:every", Crash(1, True)),
        ("hang=after:40tokens", Hang(40, None, False)),
        ("hang=after:40tokens:2.5", Hang(40, 2.5, False)),
        ("hang=after:40tokens:3s:every", Hang(40, 3.0, True)),
        ("hang=after:40tokens:every", Hang(40, None, True)),
        ("poison=user:Jean Valjean", Poison("Jean Valjean")),
        ("oom=request:3", MemoryShort(3)),
        ("foreign=900MiB@1", Foreign(900 * MIB, 1)),
        ("nvml=lost:10s", NvmlLoss(10.0, None)),
        ("nvml=lost:0.5s@1", NvmlLoss(0.5, 1)),
    ],
)
def test_each_form(text, fault):
    assert parse_faults(text, 2) == (fault,)


def test_several_in_their_order():
    faults = parse_faults("crash=after:5tokens, crash=after:9tokens,leak=1MiB/request@0", 1)
    assert faults == (Crash(5, False), Crash(9, False), Leak(MIB, 0))
    assert parse_faults("", 0) == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fire", f"--faults fire: there is no such fault; there are {', '.join(FORMS)}"),
        ("leak=4MB/request@1", "--faults leak=4MB/request@1: expected leak=4MiB/request@1"),
        ("leak=4MiB/request", "expected leak=4MiB/request@1"),
        ("crash=after:0tokens", "expected crash=after:40tokens[:every]"),
        ("crash=after:4tokens:twice", "expected crash=after:40tokens[:every]"),
        ("hang=after:4tokens:-1", "expected hang=after:40tokens[:SECONDS][:every]"),
        ("poison=user:", "expected poison=user:NAME"),
        ("oom=request:0", "expected oom=request:3"),
        ("foreign=900MiB@2", "--faults foreign=900MiB@2: there are 2 simulated cards"),
        ("nvml=lost:10s@2", "there are 2 simulated cards"),
        ("crash=after:5tokens,,oom=request:1", "--faults : there is no such fault"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(text, words):
    with pytest.raises(ConfigError) as caught:
        parse_faults(text, 2)
    assert words in str(caught.value)


@pytest.mark.parametrize("text", ["leak=1MiB/request@0", "foreign=1MiB@0", "nvml=lost:1s@0"])
def test_faults_of_cards_need_cards(text):
    with pytest.raises(ConfigError, match="there are no simulated cards; give --simulate-gpus"):
        parse_faults(text, 0)
