"""How long recovery waits for what."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backoff:
    """Waits before the starts of a row of failures; the first start follows a death at once.

    A start has failed when no engine came of it. An engine has lived in vain when it died young and without a token.
    A few such lives in a row are how a poisonous request is found, so they are neither waited over nor counted at once.
    """

    first_s: float = 0.5
    longest_s: float = 8.0
    tries: int = 5
    """So many failed starts in a row, and no engine can be had."""
    young_s: float = 60.0
    free_lives: int = 8
    lives: int = 16
    """So many lives in vain in a row, and it is not a request that is to blame."""

    def wait_s(self, failed: int, in_vain: int = 0) -> float:
        failures = max(failed, in_vain - self.free_lives)
        return 0.0 if failures <= 0 else min(self.longest_s, self.first_s * 2 ** (failures - 1))


@dataclass(frozen=True, slots=True)
class Patience:
    """All in seconds."""

    backoff: Backoff = Backoff()
    hang_s: float = 30.0
    """Silence of an engine that has work, at least; see HangWatch."""
    start_s: float = 600.0
    """Silence of an engine that is starting: it tells of every step of its load."""
    tick_s: float = 1.0
    """How often the two are looked at."""
    stop_s: float = 2.0
    """From asking an engine that has no work any more to end, to killing it."""
    reap_s: float = 10.0
    """From killing it to being stuck."""
    settle_s: float = 30.0
    """Until its memory is back."""
