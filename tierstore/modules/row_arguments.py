"""Arguments of calls that read and overwrite rows, checked and in memory that the engine takes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tierstore.errors import InputError
from tierstore.optim import OptimizerSpec


def on_host(values: object, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor, or numbers in lists, in memory of the host, whatever torch's default device is.

    ``dtype``: of the result; None for that of a tensor, or for integers."""
    if isinstance(values, Tensor):
        return values.detach().cpu().to(dtype or values.dtype)
    return torch.as_tensor(values, dtype=dtype, device="cpu").detach()


def checked_row_ids(ids: object) -> NDArray[np.int64]:
    """Return ``ids`` as int64 (n,). Raises InputError unless they are 1-D and int64 or int32."""
    try:
        tensor = on_host(ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"ids must be a 1-D tensor of integers: {error}") from None
    if isinstance(ids, list) and not ids:
        tensor = tensor.long()
    if tensor.dtype not in (torch.int64, torch.int32) or tensor.dim() != 1:
        raise InputError(f"ids must be a 1-D int64 or int32 tensor, not {tensor.dim()}-D {tensor.dtype}")
    return tensor.to(torch.int64).numpy()


def float_matrix(name: str, tensor: object, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Return ``tensor`` as contiguous float32. Raises InputError, which says ``name``, for another shape."""
    value = on_host(tensor, torch.float32)
    if tuple(value.shape) != shape:
        raise InputError(f"{name} has shape {tuple(value.shape)}; it must be {shape}")
    return value.contiguous().numpy()


def state_matrix(
    spec: OptimizerSpec, state: Mapping[str, object], count: int, dim: int
) -> NDArray[np.float32]:
    """Return an optimizer's ``state`` of ``count`` rows by name as (count, floats of state).

    Raises InputError for names or shapes that ``spec`` does not have.
    """
    if set(state) != set(spec.state_names):
        raise InputError(f"optimizer state has {sorted(state)}; {spec.name} has {sorted(spec.state_names)}")
    columns = [
        float_matrix(name, state[name], spec.state_shape(name, count, dim)).reshape(count, -1)
        for name in spec.state_names
    ]
    return np.concatenate(columns, axis=1) if columns else np.empty((count, 0), np.float32)
