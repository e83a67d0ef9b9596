"""The CPU backend on simulated cards: planned, charged and stretched as a CUDA engine would be, run on the host."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from engine.backend import Backend, Model, Progress
from engine.config import EngineConfig
from engine.errors import ConfigError, DoesNotFit
from engine.kv_cache.arena_storage import kv_in_arena
from engine.kv_cache.blocks import BlockPool
from engine.kv_cache.elastic import ElasticKv, StageMemory
from engine.kv_cache.geometry import KvGeometry
from engine.kv_cache.pieces import KvPieces
from engine.kv_cache.storage import KvStorage, cpu_kv_dtype
from engine.ladder import Ladder
from engine.memory.arena import HostArena
from engine.memory.ledger import Ledger
from engine.memory.nominal import NominalMemory
from engine.memory.owners import Owner
from engine.memory.simulated_gpus import SimulatedGpus
from engine.messages import DeviceReady, Submit
from engine.pipeline import Pipeline
from engine.plan import Ask, Card, Demand, Plan, file_demand, low_line, mend_measured, plan_cards, refusal
from engine.sequence import StepPlan, StepResult

FEW_GRAPHS = "graph buckets"


class PooledPipeline:
    """engine.pipeline.Pipeline on the host, with the pool of a card's allocator: to read a prompt takes from it."""

    def __init__(self, pipeline: Pipeline, memory: NominalMemory) -> None:
        self._pipeline = pipeline
        self._memory = memory

    def admit(self, slot: int, submit: Submit, generated: list[int]) -> None:
        self._pipeline.admit(slot, submit, generated)

    def launch(self, plan: StepPlan) -> None:
        if plan.prefill is not None:
            self._memory.touch_pools()
        self._pipeline.launch(plan)

    def collect(self) -> StepResult:
        return self._pipeline.collect()

    def drop(self, slot: int) -> None:
        self._pipeline.drop(slot)

    @property
    def in_flight(self) -> int:
        return self._pipeline.in_flight


@dataclass(frozen=True, slots=True)
class Arrangement:
    """A plan that fits, for cards as they are now, with what it was made from."""

    gpus: SimulatedGpus
    needs: Demand
    ask: Ask
    plan: Plan

    @classmethod
    def of(cls, config: EngineConfig, model: Model) -> Self:
        """Nothing is allocated. Raises DoesNotFit with the two cheapest ways out, or ConfigError."""
        assert config.simulated_gpus is not None
        gpus = SimulatedGpus.open(Path(config.simulated_gpus))
        there = range(len(gpus.cards))
        stages = config.devices or tuple(there)
        for device in stages:
            if device not in there:
                raise ConfigError(f"--devices {','.join(map(str, stages))}: there are {len(there)} cards, from 0 on")
        used = list(dict.fromkeys(stages))
        ask = Ask(
            cards=tuple(
                Card(device, gpus.cards[device].total, gpus.cards[device].reserved, gpus.free(device))
                for device in used
            ),
            stages=tuple(used.index(device) for device in stages),
            kv_dtype=cpu_kv_dtype(config.kv_dtype),
            max_context=config.max_context,
            max_batch=config.max_batch,
            prefill_rows=max(config.prefill_chunk, config.prefill_chunk_idle),
            kv_pool_mib=config.kv_pool_mib,
            layer_split=config.layer_split,
            reserve_mib=config.vram_reserve_mib,
            reserve_later_mib=config.vram_reserve_later_mib,
            few_graphs=FEW_GRAPHS in config.without,
        )
        needs = file_demand(model.gguf, max_batch=config.max_batch)
        plan = plan_cards(needs, ask)
        if not plan.fits:
            raise DoesNotFit(f"{config.model_path}: {refusal(plan)}")
        return cls(gpus, needs, ask, plan)

    @property
    def devices(self) -> list[int]:
        return [card.device for card in self.plan.cards]

    def device_of(self, stage: int) -> int:
        return self.plan.cards[self.ask.stages[stage]].device

    def say_what_is_low(self) -> None:
        for card in self.plan.cards:
            if card.low:
                sys.stderr.write(low_line(card, card.room, card.mend) + "\n")

    def say_what_came_out_low(self) -> None:
        """Of cards that are fuller than planned now that everything is loaded."""
        free = {device: self.gpus.free(device) for device in self.devices}
        planned = {card.device for card in self.plan.cards if card.low}
        mends = mend_measured(self.needs, self.ask, self.plan, free)
        for card in self.plan.cards:
            if card.device in mends and card.device not in planned:
                sys.stderr.write(low_line(card, free[card.device], mends[card.device]) + "\n")


def load_cards(config: EngineConfig, model: Model, progress: Progress) -> Backend:
    """Plan, charge, load. Raises DoesNotFit or ConfigError before anything is allocated, and OutOfMemory where the
    cards have less free by then than they had for the plan."""
    made = Arrangement.of(config, model)
    made.say_what_is_low()
    plan, ledger = made.plan, Ledger(made.devices, made.gpus)
    few = FEW_GRAPHS in config.without
    memory = NominalMemory(plan, config.max_batch, ledger, made.gpus, few_graphs=few)
    progress("context", 0, 1)
    memory.hold([Owner.CONTEXT, Owner.MODULES])
    progress("context", 1, 1)
    memory.hold([Owner.WEIGHTS, Owner.SCRATCH, Owner.CUBLAS_WORKSPACE])
    dtype = cpu_kv_dtype(config.kv_dtype)
    pool = BlockPool(
        plan.kv_blocks,
        model.fingerprint(dtype),
        group_blocks=plan.kv_group_blocks,
        minimum=plan.kv_minimum_blocks,
    )
    stages, storages = _arenas(made, ledger)
    elastic = ElasticKv(pool, stages)
    from engine.ops.cpu.load import load_onto
    from engine.ops.cpu.pipeline import LARGEST_CHUNK

    pipeline = load_onto(model.gguf, model.config, config, storages, progress)
    memory.hold([Owner.CUDA_GRAPHS])
    made.say_what_came_out_low()
    return Backend(
        pipeline=PooledPipeline(pipeline, memory),
        pool=pool,
        pieces=KvPieces(storages),
        ladder=Ladder(memory, elastic, {card.device: card.reserve for card in plan.cards}),
        device="cpu",
        kv_dtype=dtype,
        kv_bytes=sum(elastic.held.values()),
        weight_bytes=sum(card.owners[Owner.WEIGHTS] for card in plan.cards),
        max_context=plan.max_context,
        largest_chunk=LARGEST_CHUNK,
        devices=_devices(made, memory, elastic),
        layer_split=list(plan.split),
        dropped=[FEW_GRAPHS] if few else [],
    )


def _arenas(made: Arrangement, ledger: Ledger) -> tuple[list[StageMemory], list[KvStorage]]:
    """Addresses for the K and V of every stage, with no memory behind them yet."""
    plan, needs, stages, storages = made.plan, made.needs, [], []
    for stage, layers in enumerate(plan.split):
        geometry = KvGeometry(layers, needs.kv_heads, needs.head_dim, made.ask.kv_dtype).coarse(plan.kv_blocks)
        size = geometry.address_granules(plan.kv_blocks) * geometry.granule
        arena = HostArena(ledger, made.device_of(stage), Owner.KV_CACHE, size, geometry.granule)
        stages.append(StageMemory(made.device_of(stage), geometry, arena))
        storages.append(kv_in_arena(arena.array, geometry, plan.kv_blocks))
    return stages, storages


def _devices(made: Arrangement, memory: NominalMemory, elastic: ElasticKv) -> list[DeviceReady]:
    return [
        DeviceReady(
            device=card.device,
            uuid=f"SIMULATED-{card.device}",
            name=f"simulated {card.total >> 20} MiB",
            stages=[stage for stage in range(len(made.plan.split)) if made.device_of(stage) == card.device],
            total=card.total,
            reserve=card.reserve,
            ledger=ledger,
            elastic_bytes=elastic.elastic[card.device],
            elastic_plan_bytes=elastic.elastic[card.device],
            largest_late_bytes=card.largest_late,
        )
        for card, ledger in zip(made.plan.cards, memory.ledger(), strict=True)
    ]
