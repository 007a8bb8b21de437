"""Registers the jagged and keyed tensors as pytree nodes, so that tree_map and prefetchers see their tensors.

Leaves are the tensors in a fixed order, None where one is absent, so that the structure stays the same when a
method computes the offsets. Rebuilding checks nothing: a walk may put anything in a leaf's place.
"""

from __future__ import annotations

from typing import Any

from torch.fx._pytree import register_pytree_flatten_spec
from torch.utils import _pytree as pytree

from tierstore.sparse.jagged import JaggedTensor
from tierstore.sparse.keyed import KeyedTensor
from tierstore.sparse.keyed_jagged import KeyedJaggedTensor

JAGGED_LEAVES = ("_values", "_weights", "_lengths", "_offsets")
KEYED_JAGGED_LEAVES = (*JAGGED_LEAVES, "_stride_per_key_per_rank", "_inverse_indices")


def _flatten_jagged(jagged: JaggedTensor) -> tuple[list[Any], None]:
    return [getattr(jagged, name) for name in JAGGED_LEAVES], None


def _unflatten_jagged(leaves: Any, context: None) -> JaggedTensor:
    return JaggedTensor._unchecked(*leaves)


def _flatten_keyed_jagged(keyed: KeyedJaggedTensor) -> tuple[list[Any], Any]:
    leaves: list[Any] = [getattr(keyed, name) for name in KEYED_JAGGED_LEAVES[:-1]]
    inverse = keyed._inverse_indices
    leaves.append(None if inverse is None else inverse[1])
    # With keys, the stride follows from the lengths, which a walk may change.
    stride = None if keyed._keys else keyed._stride
    return leaves, [list(keyed._keys), None if inverse is None else list(inverse[0]), stride]


def _unflatten_keyed_jagged(leaves: Any, context: Any) -> KeyedJaggedTensor:
    keys, inverse_keys, stride = context
    values, weights, lengths, offsets, strides, inverse = leaves
    return object.__new__(KeyedJaggedTensor)._assign(
        keys,
        values,
        weights,
        lengths,
        offsets,
        stride,
        strides,
        None if inverse_keys is None else (inverse_keys, inverse),
    )


def _flatten_keyed(keyed: KeyedTensor) -> tuple[list[Any], Any]:
    return [keyed._values], [list(keyed._keys), list(keyed._length_per_key), keyed._key_dim]


def _unflatten_keyed(leaves: Any, context: Any) -> KeyedTensor:
    keys, length_per_key, key_dim = context
    return KeyedTensor.of_parts(keys, length_per_key, leaves[0], key_dim)


def _named(flatten: Any, names: tuple[str, ...]) -> Any:
    def flatten_with_keys(node: Any) -> tuple[list[Any], Any]:
        leaves, context = flatten(node)
        return [(pytree.GetAttrKey(name), leaf) for name, leaf in zip(names, leaves, strict=True)], context

    return flatten_with_keys


def _by_spec(flatten: Any) -> Any:
    return lambda node, spec: flatten(node)[0]


for _class, _flatten, _unflatten, _names in (
    (JaggedTensor, _flatten_jagged, _unflatten_jagged, JAGGED_LEAVES),
    (KeyedJaggedTensor, _flatten_keyed_jagged, _unflatten_keyed_jagged, KEYED_JAGGED_LEAVES),
    (KeyedTensor, _flatten_keyed, _unflatten_keyed, ("_values",)),
):
    pytree.register_pytree_node(
        _class,
        _flatten,
        _unflatten,
        serialized_type_name=f"tierstore.sparse.{_class.__name__}",
        flatten_with_keys_fn=_named(_flatten, _names),
    )
    # FX flattens by this where a traced module takes such a tensor apart (concrete_args).
    register_pytree_flatten_spec(_class, _by_spec(_flatten))
