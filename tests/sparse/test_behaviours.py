"""What torchrec's own tests ask of jagged tensors: its classes and ours give the same answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchrec
from torch.fx._pytree import tree_flatten_spec
from torch.utils import _pytree as pytree
from torchrec.distributed.dist_data import _get_recat
from torchrec.sparse.jagged_tensor import ComputeJTDictToKJT, ComputeKJTToJTDict, jt_is_equal, kjt_is_equal
from torchrec.sparse.jagged_tensor_validator import validate_keyed_jagged_tensor

import tierstore
from tierstore import torchrec as mirror

Behaviour = Callable[[Any], Any]
BEHAVIOURS: list[Behaviour] = []
VALUES = torch.arange(1.0, 9.0)
WEIGHTS = torch.tensor([1.0, 0.5, 1.5, 1.0, 0.5, 1.0, 1.0, 1.5])
OFFSETS = torch.tensor([0, 2, 2, 3, 4, 5, 8], dtype=torch.int32)
LENGTHS = OFFSETS.diff()
KEYS = ["a", "b"]


def behaviour(function: Behaviour) -> Behaviour:
    BEHAVIOURS.append(function)
    return function


def plain(found: Any) -> Any:
    """The answer without what tells the libraries apart."""
    if isinstance(found, torch.Tensor):
        return found.dtype, tuple(found.shape), found.device.type, [] if found.is_meta else found.tolist()
    if isinstance(found, torchrec.KeyedTensor):
        return "KT", found.keys(), found.length_per_key(), found.key_dim(), plain(found.values())
    if isinstance(found, torchrec.KeyedJaggedTensor):
        parts = (found.values(), found.weights_or_none(), found.lengths())
        return "KJT", found.keys(), found.stride(), found.stride_per_key(), *map(plain, parts)
    if isinstance(found, torchrec.JaggedTensor):
        return "JT", *map(plain, (found.values(), found.weights_or_none(), found.lengths()))
    if isinstance(found, dict):
        return {key: plain(value) for key, value in found.items()}
    return [plain(one) for one in found] if isinstance(found, list | tuple) else found


def keyed(lib: Any, **more: Any) -> Any:
    return lib.KeyedJaggedTensor(KEYS, VALUES, WEIGHTS, offsets=OFFSETS, **more)


def different(lib: Any) -> Any:
    """Two bags of one key, four of the other."""
    return keyed(lib, stride_per_key_per_rank=[[2], [4]])


def jagged(lib: Any, **more: Any) -> Any:
    return lib.JaggedTensor(VALUES, lengths=LENGTHS, **more)


def table(lib: Any, dim: int = 1) -> Any:
    return lib.KeyedTensor.from_tensor_list(
        KEYS, [torch.ones(2, 3), torch.full((2, 3), 2.0)], key_dim=dim, cat_dim=dim
    )


@behaviour
def keys_are_looked_up(lib: Any) -> Any:
    return [kjt[key] for kjt in (keyed(lib), different(lib)) for key in KEYS]


@behaviour
def dicts(lib: Any) -> Any:
    return [keyed(lib).to_dict(), different(lib).to_dict(), table(lib).to_dict(), table(lib, 0).to_dict()]


@behaviour
def figures(lib: Any) -> Any:
    kjts = [keyed(lib), different(lib), keyed(lib).sync(), different(lib).sync()]
    return [
        [
            *(k.stride(), k.stride_per_key(), k.stride_per_key_per_rank(), k.variable_stride_per_key()),
            *(k.length_per_key(), k.offset_per_key(), k.lengths_offset_per_key(), k.index_per_key()),
            k.device().type,
        ]
        for k in kjts
    ]


@behaviour
def storage_is_given_back(lib: Any) -> Any:
    parts = [part.clone() for part in (VALUES, WEIGHTS, LENGTHS)]
    kjt = lib.KeyedJaggedTensor(KEYS, *parts)
    if not hasattr(torchrec.KeyedJaggedTensor, "clear_storage"):  # torchrec 1.6
        return None
    return [kjt.clear_storage(), *(part.untyped_storage().size() for part in parts)]


@behaviour
def splits(lib: Any) -> Any:
    return [
        kjt.split(cut) for kjt in (keyed(lib), different(lib)) for cut in ([1, 1], [0, 2], [2], [1, 0, 1])
    ]


@behaviour
def splits_with_a_key_of_no_bags(lib: Any) -> Any:
    kjt = lib.KeyedJaggedTensor(
        ["a", "b", "c", "d"],
        torch.arange(10.0),
        lengths=torch.tensor([2, 0, 1, 1, 1, 3, 0, 2], dtype=torch.int32),
        stride_per_key_per_rank=[[3], [0], [1], [4]],
    )
    return [kjt.split([1, 1, 2]), kjt.split([0, 3, 0, 1])]


@behaviour
def permutations(lib: Any) -> Any:
    kjts = (keyed(lib).sync(), different(lib).sync())
    return [kjt.permute(order) for kjt in kjts for order in ([1, 0], [1], [0, 1, 0])]


@behaviour
def concatenations(lib: Any) -> Any:
    other = lib.KeyedJaggedTensor(["c"], VALUES[:2], WEIGHTS[:2], lengths=torch.tensor([1, 0, 1]).int())
    return lib.KeyedJaggedTensor.concat([keyed(lib), other])


@behaviour
def empty_batches(lib: Any) -> Any:
    none = torch.tensor([])
    first = lib.KeyedJaggedTensor(["a"], none, lengths=none)
    second = lib.KeyedJaggedTensor(["b"], none, offsets=none)
    lengths = torch.tensor([[], []]).int()
    flat = lib.KeyedJaggedTensor(KEYS, none, lengths=lengths, length_per_key=[0, 0])
    nothing, like = lib.KeyedJaggedTensor.empty(), lib.KeyedJaggedTensor.empty_like(keyed(lib))
    differing = lib.KeyedJaggedTensor(["a"], none, lengths=none, stride_per_key_per_rank=[[]])
    return [
        [first["a"].values(), second["b"].values(), first.stride(), flat.stride(), differing.stride()],
        [lib.KeyedJaggedTensor.concat([first, second])[key].values() for key in KEYS],
        [part.lengths().numel() for part in flat.to_dict().values()],
        [nothing.to_dict(), nothing.keys(), nothing.values(), like.keys(), like.stride(), like.to_dict()],
    ]


@behaviour
def empty_with_dtypes(lib: Any) -> Any:
    options = {"values_dtype": torch.int64, "weights_dtype": torch.float64, "lengths_dtype": torch.int64}
    made = [lib.KeyedJaggedTensor.empty(True, **options), lib.JaggedTensor.empty(True, **options)]
    return [[one.values(), one.weights(), one.lengths()] for one in made]


@behaviour
def texts(lib: Any) -> Any:
    none = torch.tensor([])
    bare = lib.KeyedJaggedTensor(KEYS, VALUES, offsets=OFFSETS)
    every = [keyed(lib), different(lib), bare, lib.KeyedJaggedTensor(["a"], none, lengths=none.int())]
    return [str(one) for one in (*every, jagged(lib), jagged(lib, weights=WEIGHTS), table(lib))]


@behaviour
def flat_lengths(lib: Any) -> Any:
    kjt = lib.KeyedJaggedTensor.from_lengths_sync(KEYS, VALUES, LENGTHS.view(2, 3))
    return [kjt.flatten_lengths().lengths(), kjt.stride(), kjt.flatten_lengths()["b"]]


@behaviour
def moves(lib: Any) -> Any:
    kjt, meta = keyed(lib).to(torch.device("cpu")), keyed(lib).to(torch.device("meta"))
    halves = keyed(lib).to(torch.device("cpu"), dtype=torch.float16)
    parts = [meta.values(), meta.weights(), meta.offsets()]
    others = [jagged(lib).to(torch.device("meta")).values(), table(lib).to(torch.device("meta")).values()]
    return [kjt, parts, meta.keys(), halves.weights(), halves.values(), others]


@behaviour
def on_the_meta_device(lib: Any) -> Any:
    values, offsets = VALUES.to("meta"), OFFSETS.to("meta")
    kjt = lib.KeyedJaggedTensor.from_offsets_sync(KEYS, values, offsets)
    lengths = lib.KeyedJaggedTensor(KEYS, values, lengths=offsets[1:])
    joined = lib.KeyedTensor.from_tensor_list(KEYS, [values.view(2, 4), values.view(2, 4)])
    regrouped = lib.KeyedTensor.regroup([joined], [["b"], ["a", "b"]])
    return [
        [kjt.stride(), kjt.lengths(), kjt.values(), kjt.device().type, lengths.offsets()],
        [kjt.length_per_key(), kjt["b"], kjt.permute([1]).values(), kjt.split([1, 1])[1].values()],
        [joined["a"], regrouped],
    ]


@behaviour
def jagged_tensors_of_dense_ones(lib: Any) -> Any:
    rows = [torch.tensor([1.0]), torch.tensor([]), torch.tensor([7.0, 8.0])]
    first = lib.JaggedTensor.from_dense(rows, rows)
    second = lib.JaggedTensor.from_dense_lengths(torch.arange(6.0).view(2, 3), torch.tensor([1, 3]).int())
    dense = [
        *first.to_dense(),
        *first.to_dense_weights(),
        first.to_padded_dense(),
        second.to_padded_dense(2, 9),
    ]
    return [first, second, dense, first.to_padded_dense_weights(3, 0.5), second.to_dense_weights()]


@behaviour
def regrouping(lib: Any) -> Any:
    other = lib.KeyedTensor(["c", "d"], [1, 2], torch.arange(6.0).view(2, 3))
    groups = [["d", "a"], ["b", "d", "a"]]
    one = lib.KeyedTensor.regroup([table(lib)], [["b", "a"], ["a"]])
    return [
        one,
        lib.KeyedTensor.regroup([table(lib), other], groups),
        lib.KeyedTensor.regroup_as_dict([table(lib), other], groups, ["x", "y"]),
    ]


@behaviour
def walks(lib: Any) -> Any:
    found = []
    for one in (keyed(lib), different(lib), jagged(lib, weights=WEIGHTS), table(lib)):
        leaves, spec = pytree.tree_flatten(one)
        found.append([pytree.tree_unflatten(leaves, spec), tree_flatten_spec(one, spec), len(leaves)])
        found.append(pytree.tree_map(lambda leaf: None if leaf is None else leaf * 1, one))
    return found


@behaviour
def equality_by_torchrecs_functions(lib: Any) -> Any:
    same = lib.KeyedJaggedTensor(KEYS, VALUES, WEIGHTS, lengths=LENGTHS)
    other_keys = lib.KeyedJaggedTensor(["a", "c"], VALUES, WEIGHTS, lengths=LENGTHS)
    bare = lib.KeyedJaggedTensor(KEYS, VALUES, lengths=LENGTHS)
    moved = lib.KeyedJaggedTensor(KEYS, VALUES, WEIGHTS, lengths=LENGTHS.flip(0))
    fewer = lib.KeyedJaggedTensor(KEYS[:1], VALUES[:3], WEIGHTS[:3], lengths=LENGTHS[:3])
    others = (same, other_keys, bare, moved, fewer, keyed(lib).permute([1, 0]), "text")
    parts = (jagged(lib), lib.JaggedTensor(VALUES, offsets=OFFSETS), jagged(lib, weights=WEIGHTS))
    return [
        [kjt_is_equal(keyed(lib), other) for other in others],
        [jt_is_equal(jagged(lib), other) for other in (*parts, keyed(lib)["a"], None)],
    ]


@behaviour
def torchrecs_modules_take_them(lib: Any) -> Any:
    as_dict = ComputeKJTToJTDict()(keyed(lib))
    joined = ComputeJTDictToKJT()({"a": jagged(lib), "b": jagged(lib)})
    return [as_dict, joined.keys(), joined.lengths(), lib.KeyedJaggedTensor.from_jt_dict({"a": jagged(lib)})]


@behaviour
def torchrecs_validator_takes_them(lib: Any) -> Any:
    ids = lib.KeyedJaggedTensor(KEYS, VALUES.long(), WEIGHTS, offsets=OFFSETS)
    return validate_keyed_jagged_tensor(ids)


@behaviour
def inverse_indices(lib: Any) -> Any:
    indices = (KEYS, torch.tensor([[0, 1, 1, 0], [0, 1, 2, 3]]))
    kjt = keyed(lib, stride_per_key_per_rank=[[2], [4]], inverse_indices=indices)
    return [kjt.stride(), *kjt.inverse_indices(), kjt.inverse_indices_or_none()[0], kjt.sync()]


@behaviour
def copies(lib: Any) -> Any:
    target = lib.KeyedJaggedTensor.empty_like(keyed(lib), device=torch.device("cpu"))
    target.copy_(keyed(lib))
    bags = lib.JaggedTensor.empty_like(jagged(lib), device=torch.device("cpu"))
    bags.copy_(jagged(lib))
    return [target, bags]


@behaviour
def gradients_flow_through(lib: Any) -> Any:
    values = torch.arange(6.0).view(2, 3).requires_grad_()
    kt = lib.KeyedTensor(KEYS, [1, 2], values)
    (kt["b"].sum() + lib.KeyedTensor.regroup([kt], [["b", "a"]])[0].square().sum()).backward()
    weights = WEIGHTS.clone().requires_grad_()
    kjt = lib.KeyedJaggedTensor(KEYS, VALUES, weights, offsets=OFFSETS)
    (kjt["b"].weights().sum() + kjt.permute([1, 0]).weights().square().sum()).backward()
    return [values.grad, weights.grad]


@behaviour
def what_ranks_send(lib: Any) -> Any:
    bare = lib.KeyedJaggedTensor(KEYS, VALUES, offsets=OFFSETS)
    return [
        [kjt.dist_labels(), kjt.dist_tensors(), *(kjt.dist_splits(cut) for cut in ([1, 1], [0, 2], [2], [1]))]
        for kjt in (keyed(lib), different(lib), bare, different(lib).permute([1, 0]))
    ]


def sent(lib: Any, strides: list[list[int]], variable: bool, weighted: bool) -> tuple[list[Any], Any]:
    """What ranks send of three keys of ``strides[rank]`` bags, and what each would make of them."""
    random = torch.Generator().manual_seed(len(strides))
    keys, parts = ["a", "b", "c"], []
    for own in strides:
        lengths = torch.randint(0, 4, (sum(own),), generator=random, dtype=torch.int32)
        values = torch.randint(0, 99, (int(lengths.sum()),), generator=random)
        weights = torch.rand(len(values), generator=random) if weighted else None
        more = {"stride_per_key_per_rank": [[one] for one in own]} if variable else {}
        parts.append(lib.KeyedJaggedTensor(keys, values, weights, lengths=lengths, **more))
    return [torch.cat(one) for one in zip(*(part.dist_tensors() for part in parts), strict=True)], keys


@behaviour
def what_ranks_get_with_equal_batches(lib: Any) -> Any:
    found = []
    for ranks, stagger in ((2, 1), (4, 2), (1, 1)):
        tensors, keys = sent(lib, [[3, 3, 3]] * ranks, False, ranks == 2)
        recat = _get_recat(3, ranks, stagger)
        found += [
            lib.KeyedJaggedTensor.dist_init(keys, tensors, False, ranks, order, [3] * ranks, stagger)
            for order in (recat, None)
        ]
    nothing = [torch.empty(0, dtype=torch.int32), torch.empty(0, dtype=torch.int64)]
    return [*found, lib.KeyedJaggedTensor.dist_init(KEYS, nothing, False, 2, _get_recat(2, 2), [0, 0])]


@behaviour
def what_ranks_get_with_batches_that_differ_by_rank(lib: Any) -> Any:
    tensors, keys = sent(lib, [[1] * 3, [4] * 3, [0] * 3, [2] * 3], False, True)
    made = [_get_recat(3, 4, stagger, batch_size_per_rank=[1, 4, 0, 2]) for stagger in (1, 2)]
    return [lib.KeyedJaggedTensor.dist_init(keys, tensors, False, 4, order, [1, 4, 0, 2]) for order in made]


@behaviour
def what_ranks_get_with_batches_that_differ_by_key(lib: Any) -> Any:
    found = []
    for weighted in (False, True):
        tensors, keys = sent(lib, [[1, 2, 0], [4, 0, 3], [2, 2, 2], [0, 1, 5]], True, weighted)
        for stagger in (1, 2):
            recat = _get_recat(3, 4, stagger)
            kjt = lib.KeyedJaggedTensor.dist_init(keys, tensors, True, 4, recat, None, stagger)
            found += [kjt, kjt.stride_per_key_per_rank(), kjt.length_per_key(), kjt.offset_per_key()]
    nothing = [torch.empty(0, dtype=torch.int32), torch.empty(0, dtype=torch.int64), torch.empty(0).long()]
    empty = lib.KeyedJaggedTensor.dist_init([], nothing, True, 2, None, None)
    return [*found, empty.keys(), empty.values(), empty.lengths()]


def raised(call: Callable[[], Any]) -> bool:
    try:
        call()
    except Exception:
        return True
    return False


@behaviour
def mistakes_are_errors(lib: Any) -> Any:
    bare = lib.KeyedJaggedTensor(KEYS, VALUES, offsets=OFFSETS)
    calls: list[Callable[[], Any]] = [
        bare.weights,
        lambda: bare["nothing"],
        lambda: table(lib)["nothing"],
        bare.inverse_indices,
        lambda: lib.JaggedTensor(VALUES),
        lambda: lib.KeyedTensor.regroup([table(lib)], [["nothing"]]),
        jagged(lib).weights,
        lambda: lib.KeyedJaggedTensor.concat([bare, keyed(lib)]),
    ]
    return [raised(call) for call in calls]


@pytest.mark.parametrize("ask", BEHAVIOURS, ids=lambda ask: ask.__name__)
def test_answers_agree(ask: Behaviour) -> None:
    assert mirror.EmbeddingBagCollection is not None  # so that isinstance() of torchrec's classes knows ours
    assert plain(ask(tierstore)) == plain(ask(torchrec))
