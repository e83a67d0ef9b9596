"""Cards to pretend to have, and faults to have on purpose: held against each other before anything starts."""

from app.devices import Devices, Simulation
from app.settings import Settings
from engine.config import NvmlLoss, Poison, parse_faults
from engine.errors import ConfigError
from engine.plan import Ask, Card, parse_cards, simulate_cards
from watchdog.simulated import Loss, SimulatedSource
from watchdog.source import SourceError

MIB = 1 << 20


def simulate(settings: Settings) -> Simulation:
    """Make the cards, and check what asks for room on them. Raises ConfigError."""
    sizes = [] if settings.simulate_gpus is None else parse_cards(settings.simulate_gpus, "--simulate-gpus")
    faults = parse_faults(settings.faults, len(sizes))
    losses = [Loss(fault.seconds, fault.device) for fault in faults if isinstance(fault, NvmlLoss)]
    poison = next((fault.user for fault in faults if isinstance(fault, Poison)), None)
    if len(losses) > 1:
        raise ConfigError("--faults: nvml can be lost only once")
    if not sizes:
        return Simulation(poison=poison)
    cards = simulate_cards(settings.simulated_gpus, sizes, settings.simulate_release_seconds)
    _check_room(settings, cards)
    try:
        source = SimulatedSource(settings.simulated_gpus, losses[0] if losses else None)
    except SourceError as error:
        raise ConfigError(f"--simulate-gpus: {error}") from error
    return Simulation(Devices(source, "simulated", source.arm), poison)


def _check_room(settings: Settings, cards: tuple[Card, ...]) -> None:
    """What the engine would refuse later, when it has been started for nothing."""
    Ask(
        cards=cards,
        kv_dtype="f32",
        reserve_mib=settings.vram_reserve_mib,
        reserve_later_mib=settings.vram_reserve_later_mib,
    )
    floors = settings.vram_floors_mib
    smallest = min(card.total for card in cards)
    if floors is not None and floors[0] * MIB >= smallest:
        written = ",".join(map(str, floors))
        raise ConfigError(f"--vram-floors-mib {written}: the smallest device has {smallest // MIB} MiB in all")
