"""How tiers hold a row: dtypes of the weights and of the optimizer's state."""

from __future__ import annotations

from dataclasses import dataclass

from tierstore.errors import ConfigError

WEIGHT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1}
"""Bytes of a weight by dtype; a row of int8 has a step and an offset besides, 4 bytes each."""
STATE_BYTES = {"fp32": 4, "bf16": 2}
TABLE_DTYPES = ("fp32", "fp16", "bf16")
"""Dtypes that the weights of a table may have in ``hbm``, where kernels update them."""
_ALIGNMENT = 16
_QUANTISATION_BYTES = 8


@dataclass(frozen=True)
class RowPart:
    """A range of a row's bytes: ``columns`` values of ``dtype`` from byte ``begin`` on."""

    name: str
    dtype: str
    columns: int
    begin: int
    bytes: int


@dataclass(frozen=True)
class RowFormat:
    """Dtypes of a row. ``csrc/kernels/row_format.h`` says where its parts lie and how they are rounded.

    Raises ``ConfigError`` for unknown dtypes.
    """

    weights: str = "fp32"
    state: str = "fp32"

    def __post_init__(self) -> None:
        for what, value, known in (
            ("weight", self.weights, WEIGHT_BYTES),
            ("state", self.state, STATE_BYTES),
        ):
            if value not in known:
                raise ConfigError(f"{what} dtype {value!r} is unknown; use one of {', '.join(known)}")

    @property
    def is_wide(self) -> bool:
        """Whether rows are float32 throughout."""
        return self == WIDE

    def weights_end(self, dim: int) -> int:
        """Return the byte of a row at which its weights end, with the zeros behind them."""
        return -(-WEIGHT_BYTES[self.weights] * dim // 4) * 4

    def row_bytes(self, dim: int, state_floats: int) -> int:
        """Return a row's bytes, a multiple of 16."""
        quantisation = _QUANTISATION_BYTES if self.weights == "int8" else 0
        size = self.weights_end(dim) + quantisation + STATE_BYTES[self.state] * state_floats
        return -(-size // _ALIGNMENT) * _ALIGNMENT

    def parts(self, dim: int, row_bytes: int) -> list[RowPart]:
        """Return the parts of a row of ``row_bytes`` bytes in their order: ``weights``, the step and offset
        of int8 as ``quantisation``, and ``state``, which ends with the row and may have no columns."""
        rest = self.weights_end(dim)
        found = [RowPart("weights", self.weights, dim, 0, WEIGHT_BYTES[self.weights] * dim)]
        if self.weights == "int8":
            found.append(RowPart("quantisation", "fp32", 2, rest, _QUANTISATION_BYTES))
            rest += _QUANTISATION_BYTES
        size = row_bytes - rest
        return [*found, RowPart("state", self.state, size // STATE_BYTES[self.state], rest, size)]


WIDE = RowFormat()
