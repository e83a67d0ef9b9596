"""`ullage plan` from its flags to its exit code: by hand on a tiny model and on one written for the purpose."""

import json
import re

import pytest

from app.__main__ import main
from tests.app.process import TINY

MIB, GIB = 1 << 20, 1 << 30


@pytest.fixture
def plan(capsys):
    def run(*arguments, model=TINY):
        code = main(["plan", str(model), *arguments])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def test_a_model_that_fits(plan):
    code, out, err = plan("--gpus", "2x4GiB")
    assert (code, err) == (0, "")
    assert re.search(r"^MiB +device 0 +device 1$", out, re.M)
    assert re.search(r"^total +4096 +4096$", out, re.M)
    assert "LOW" not in out


def test_data_has_the_documented_shape(plan):
    code, out, _ = plan("--gpus", "2GiB,3GiB", "--kv-dtype", "int8", "--json", "--vram-reserve-mib", "100,200")
    assert code == 0
    assert out.count("\n") == 1
    data = json.loads(out)
    assert data.keys() == {"fits", "devices"}
    assert data["fits"] is True
    assert [device["device"] for device in data["devices"]] == [0, 1]
    assert [device["total"] for device in data["devices"]] == [2 * GIB, 3 * GIB]
    assert [device["reserve"] for device in data["devices"]] == [100 * MIB, 200 * MIB]
    owners = {
        "context", "modules", "weights", "kv_cache", "shadow", "scratch", "cublas_workspace", "cuda_graphs",
        "pool_cached",
    }  # fmt: skip
    for device in data["devices"]:
        assert device.keys() == {"device", "total", "owners", "reserve", "room", "low", "mend"}
        assert device["owners"].keys() == owners
        assert sum(device["owners"].values()) + device["room"] + 615 * MIB == device["total"]
        assert (device["low"], device["mend"]) == (False, None)


def test_a_model_that_does_not_fit(plan):
    code, out, err = plan("--gpus", "1GiB")
    assert (code, err) == (2, "")
    assert "does not fit" in out
    code, out, _ = plan("--gpus", "1GiB", "--json")
    assert code == 2
    [device] = json.loads(out)["devices"]
    assert device["room"] < 0
    assert "device 0 lacks" in device["mend"]


def test_a_low_card_is_no_refusal_and_its_mend_mends(plan):
    arguments = ["--gpus", "1400MiB", "--json"]
    code, out, _ = plan(*arguments)
    assert code == 0
    [device] = json.loads(out)["devices"]
    assert device["low"]
    code, out, _ = plan(*arguments, *device["mend"].split())
    assert code == 0
    assert not json.loads(out)["devices"][0]["low"]


def test_the_price_of_a_later_reserve_is_printed(plan):
    code, out, _ = plan("--gpus", "2x4GiB", "--vram-reserve-later-mib", "1000")
    assert code == 0
    assert re.search(r"^--vram-reserve-later-mib costs \d+ blocks: device 0 -\d+ MiB .* layers stay$", out, re.M)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gpus", "16GB"], "--gpus 16GB: '16GB' is no size"),
        (["--gpus", "4GiB", "--max-context", "99999999"], "--max-context 99999999: the model was trained for"),
        (["--gpus", "4GiB", "--max-context", "many"], "--max-context: expected a whole number"),
        (["--gpus", "4GiB,4GiB", "--layer-split", "1,99"], "--layer-split 1,99: makes 100 layers"),
        (["--gpus", "4GiB", "--layer-split", "half"], "--layer-split half: expected auto"),
        (["--gpus", "4GiB", "--vram-reserve-mib", "4096"], "--vram-reserve-mib 4096: device 0 has 4096 MiB in all"),
        (["--gpus", "4GiB", "--vram-reserve-mib", "1,2"], "--vram-reserve-mib 1,2: 2 figures for 1 cards"),
        (["--gpus", "4GiB", "--vram-reserve-mib=-1"], "--vram-reserve-mib -1: '-1' is no number of MiB"),
        (["--gpus", "4GiB", "--vram-reserve-later-mib", "9"], "there is no card without the first stage"),
        (["--gpus", "2x4GiB", "--vram-reserve-later-mib", "x"], "--vram-reserve-later-mib: 'x' is no number of MiB"),
        (["--gpus", "9x4GiB"], "9 stages for a model of"),
    ],
)
def test_bad_input_is_one_line(plan, arguments, said):
    code, out, err = plan(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("ullage: ")
    assert said in err
    assert err.count("\n") == 1


def test_a_file_that_is_no_model_is_one_line(plan, tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"nothing")
    code, out, err = plan("--gpus", "4GiB", model=tmp_path / "x.gguf")
    assert (code, out) == (2, "")
    assert re.fullmatch(r"ullage: .*x\.gguf: .*\n", err)
