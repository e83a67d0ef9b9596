"""What a plan is asked for: the cards there are, and the user's settings as they were written."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from engine.errors import ConfigError
from engine.kv_cache.storage import KvDtype
from engine.plan.costs import COSTS, MIB, Costs
from engine.plan.sizes import mib_down
from engine.plan.split import Split

DEFAULT_RESERVE_MIB = 512


@dataclass(frozen=True, slots=True)
class Card:
    """Bytes of one distinct GPU as it is before the engine starts; what is neither free nor reserved is others'."""

    device: int
    total: int
    reserved: int
    free: int

    @classmethod
    def empty(cls, device: int, total: int, costs: Costs = COSTS) -> Self:
        """A card with nothing on it but what its driver keeps."""
        reserved = min(total, costs.driver_reserve)
        return cls(device, total, reserved, total - reserved)

    @property
    def other(self) -> int:
        return self.total - self.reserved - self.free


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Settings are None where they are to be chosen. `stages` has, for each stage, the position of its card in `cards`:
    one stage a card unless told otherwise.
    """

    cards: tuple[Card, ...]
    stages: tuple[int, ...] = ()
    kv_dtype: KvDtype
    max_context: int | None = None
    max_batch: int = 64
    prefill_rows: int = 4096
    """Prompt tokens of the largest chunk."""
    kv_pool_mib: int | None = None
    """Of all cards together."""
    layer_split: Split | None = None
    reserve_mib: tuple[int, ...] = (DEFAULT_RESERVE_MIB,)
    """One for all cards, or one for each."""
    reserve_later_mib: int | None = None
    """In place of `reserve_mib` on cards without the first stage, once the layers have been split."""
    shadow: bool = False
    few_graphs: bool = False
    """Only the largest row counts are captured: slower, for a card on which not everything has gone well."""

    def __post_init__(self) -> None:
        """Raises ConfigError for settings that cannot be meant."""
        if not self.stages:
            object.__setattr__(self, "stages", tuple(range(len(self.cards))))
        assert set(self.stages) == set(range(len(self.cards)))
        if len(self.reserve_mib) not in (1, len(self.cards)):
            raise ConfigError(
                f"--vram-reserve-mib {_joined(self.reserve_mib)}: {len(self.reserve_mib)} figures "
                f"for {len(self.cards)} cards"
            )
        for card, reserve in zip(self.cards, self.reserves(later=False), strict=True):
            self._check_reserve(f"--vram-reserve-mib {_joined(self.reserve_mib)}", card, reserve)
        if self.reserve_later_mib is None:
            return
        written = f"--vram-reserve-later-mib {self.reserve_later_mib}"
        if not self.later:
            raise ConfigError(f"{written}: there is no card without the first stage")
        for position in self.later:
            self._check_reserve(written, self.cards[position], self.reserve_later_mib * MIB)

    @staticmethod
    def _check_reserve(written: str, card: Card, reserve: int) -> None:
        if not 0 <= reserve < card.total:
            raise ConfigError(f"{written}: device {card.device} has {mib_down(card.total)} MiB in all")

    @property
    def later(self) -> list[int]:
        """Positions of the cards that do not have the first stage."""
        return [position for position in range(len(self.cards)) if position != self.stages[0]]

    def reserves(self, *, later: bool = True) -> list[int]:
        """Bytes to keep free on each card; without `later` as if `reserve_later_mib` had not been given."""
        each = self.reserve_mib * len(self.cards) if len(self.reserve_mib) == 1 else self.reserve_mib
        reserves = [mib * MIB for mib in each]
        if later and self.reserve_later_mib is not None:
            for position in self.later:
                reserves[position] = self.reserve_later_mib * MIB
        return reserves


def parse_reserves(text: str) -> tuple[int, ...]:
    """MiB, one figure or one a card joined by commas. Raises ConfigError."""
    return tuple(parse_reserve(part, f"--vram-reserve-mib {text}") for part in text.split(","))


def parse_reserve(text: str, written: str) -> int:
    """MiB; `written` is what a complaint begins with. Raises ConfigError."""
    figure = text.strip()
    if not (figure.isascii() and figure.isdigit() and len(figure) <= 9):
        raise ConfigError(f"{written}: '{text}' is no number of MiB")
    return int(figure)


def _joined(figures: Sequence[int]) -> str:
    return ",".join(map(str, figures))
