"""Jagged and keyed tensors: bags of ids per feature, and dense tensors per key. Knows torch only."""

from tierstore.sparse import pytree
from tierstore.sparse.collate import collate_jagged, collate_keyed_jagged
from tierstore.sparse.convert import as_keyed_jagged_tensor
from tierstore.sparse.jagged import JaggedTensor, jagged_by_name
from tierstore.sparse.keyed import KeyedTensor
from tierstore.sparse.keyed_jagged import KeyedJaggedTensor
from tierstore.sparse.per_key import uniform

__all__ = [
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "as_keyed_jagged_tensor",
    "collate_jagged",
    "collate_keyed_jagged",
    "jagged_by_name",
    "pytree",
    "uniform",
]
