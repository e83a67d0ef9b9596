from typing import Any

import msgspec

from app.fallback import OPTIONAL_PARTS, fallbacks, with_dropped
from engine.config import EngineConfig
from engine.messages import Ready

ASKED = EngineConfig(model_path="m", max_batch=3, kv_dtype="auto")
LAST = Ready("cpu", 1000, 3, "f16", 10, 10, 10, 1.0, layer_split=[2, 3])


def differences(config: EngineConfig, asked: EngineConfig = ASKED) -> dict[str, Any]:
    return {
        name: getattr(config, name)
        for name in EngineConfig.__struct_fields__
        if getattr(config, name) != getattr(asked, name)
    }


def test_from_what_was_asked_to_what_is_left() -> None:
    assert [differences(config) for config in fallbacks(ASKED, LAST)] == [
        {},
        {"layer_split": (2, 3), "max_context": 1000, "kv_dtype": "f16"},
        {"layer_split": (2, 3), "without": ("shadow",)},
        {"layer_split": (2, 3), "without": ("shadow", "graph buckets")},
    ]


def test_without_a_good_plan_there_is_none_to_go_back_to() -> None:
    assert [differences(config) for config in fallbacks(ASKED, None)] == [
        {},
        {"without": ("shadow",)},
        {"without": ("shadow", "graph buckets")},
    ]


def test_what_was_left_out_stays_out() -> None:
    assert {config.without for config in fallbacks(ASKED, LAST, ("graph buckets",))} == {
        ("graph buckets",),
        OPTIONAL_PARTS,
    }
    assert with_dropped(("graph buckets",), ("shadow",)) == OPTIONAL_PARTS, "in one order, so that configs compare"


def test_what_was_asked_for_outright_is_never_given_up() -> None:
    asked = msgspec.structs.replace(ASKED, max_context=5000, layer_split=(1, 4))
    for config in fallbacks(asked, None):
        assert (config.max_context, config.layer_split) == (5000, (1, 4))
