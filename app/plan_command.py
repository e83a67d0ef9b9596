"""`ullage plan`: what a model would hold on cards that need not be there. Exit code 0 if it fits, 2 if not."""

import json
import sys
from dataclasses import dataclass

from app.settings import Settings
from engine.gguf import open_gguf
from engine.plan import (
    DEFAULT_RESERVE_MIB,
    Ask,
    Card,
    file_demand,
    parse_cards,
    parse_reserve,
    parse_reserves,
    parse_split,
    plan_cards,
    plan_data,
    plan_table,
)

FITS = 0
DOES_NOT_FIT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFlags:
    """What only this command is told, as it was written."""

    model: str
    gpus: str
    layer_split: str = "auto"
    vram_reserve_mib: str = str(DEFAULT_RESERVE_MIB)
    vram_reserve_later_mib: str | None = None
    as_json: bool = False


def plan(settings: Settings, flags: PlanFlags) -> int:
    """Print the plan. Raises ConfigError and ModelFileError before anything is printed."""
    ask = _ask(settings, flags)
    made = plan_cards(file_demand(open_gguf(flags.model), max_batch=ask.max_batch), ask)
    if flags.as_json:
        sys.stdout.write(json.dumps(plan_data(made)) + "\n")
    else:
        sys.stdout.write(f"{flags.model} on {flags.gpus}: {plan_table(made)}")
    return FITS if made.fits else DOES_NOT_FIT


def _ask(settings: Settings, flags: PlanFlags) -> Ask:
    engine = settings.engine_config(flags.model)
    later = flags.vram_reserve_later_mib
    sizes = parse_cards(flags.gpus, "--gpus")
    return Ask(
        cards=tuple(Card.empty(device, size) for device, size in enumerate(sizes)),
        kv_dtype="f16" if settings.kv_dtype == "auto" else settings.kv_dtype,
        max_context=engine.max_context,
        max_batch=engine.max_batch,
        prefill_rows=engine.prefill_chunk_idle,
        kv_pool_mib=engine.kv_pool_mib,
        layer_split=parse_split(flags.layer_split),
        reserve_mib=parse_reserves(flags.vram_reserve_mib),
        reserve_later_mib=None if later is None else parse_reserve(later, "--vram-reserve-later-mib"),
    )
