"""Cards that are not there, put where engine and watchdog look for them: as asked for, less what a driver keeps."""

from collections.abc import Sequence
from pathlib import Path

from engine.memory.simulated_gpus import SimulatedCard, SimulatedGpus
from engine.plan.ask import Card
from engine.plan.costs import COSTS, Costs


def simulate_cards(path: Path, sizes: Sequence[int], release_s: float, costs: Costs = COSTS) -> tuple[Card, ...]:
    """Make the file at `path`, or set the cards of an earlier run anew; each card as it is with nothing on it.

    `sizes` are bytes; a card has back what a dead process held after `release_s`. Raises ConfigError.
    """
    cards = tuple(Card.empty(device, size, costs) for device, size in enumerate(sizes))
    made = SimulatedGpus.create(path, [SimulatedCard(card.total, card.reserved) for card in cards], release_s)
    made.close()
    return cards
