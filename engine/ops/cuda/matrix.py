"""A weight matrix as the ops see it: one product, or several side by side where its tensors are of different types."""

from dataclasses import dataclass

from engine.ops.cuda.launch import Array
from engine.ops.cuda.weight import Weight


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Columns `first` and following of the product; `bias` float32 [weight rows] or None."""

    weight: Weight
    first: int = 0
    bias: Array | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """[rows, k], or a stack of experts'. Gate and up of one type are one gated Weight, of two types two parts."""

    parts: tuple[Part, ...]

    @property
    def rows(self) -> int:
        """Columns of the product, gate and up each counted."""
        last = self.parts[-1]
        return last.first + last.weight.rows * (2 if last.weight.gated else 1)
