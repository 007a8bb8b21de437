"""Exported models have one node per lookup, which finds its module in this process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.modules.keyed_batches import keyed_batch
from tests.modules.test_lookup_ops import bag, collection, embedding, ids_of
from tierstore.modules import EmbeddingBagCollection, EmbeddingCollection
from tierstore.sparse import KeyedJaggedTensor

OURS = ("tierstore.pooled.default", "tierstore.rows.default")


def nodes_of(program: torch.export.ExportedProgram) -> list[str]:
    return [str(node.target) for node in program.graph.nodes if "tierstore" in str(node.target)]


class Keyed(nn.Module):
    def __init__(self, table: Any) -> None:
        super().__init__()
        self.table, self.top = table, nn.Linear(4, 2)

    def forward(self, values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        found = self.table(KeyedJaggedTensor(["a", "b", "c"], values, lengths=lengths))["a@t"]
        return self.top(found if isinstance(found, torch.Tensor) else found.values())


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("make", [embedding, bag])
def test_a_lookup_is_one_node(make: Any, strict: bool) -> None:
    model = nn.Sequential(make(), nn.Linear(4, 2)).eval()
    size = torch.export.Dim("batch", min=2, max=100)
    shapes = ({0: size},)
    program = torch.export.export(model, (ids_of(0, 4, 3),), dynamic_shapes=shapes, strict=strict)
    assert len(nodes_of(program)) == 1
    assert nodes_of(program)[0] in OURS
    for n in (4, 7):
        assert torch.equal(program.module()(ids_of(n, n, 3)), model(ids_of(n, n, 3)))
    lowered = program.run_decompositions()
    assert nodes_of(lowered) == nodes_of(program)
    model[0].load_rows([0], torch.ones(1, 4))  # the program has no copy of the rows
    zero = torch.zeros(4, 3, dtype=torch.int64)
    assert torch.equal(lowered.module()(zero), model(zero))


@pytest.mark.parametrize("kind", [EmbeddingBagCollection, EmbeddingCollection])
@pytest.mark.parametrize("strict", [False, True])
def test_a_lookup_of_a_collection_is_one_node(kind: Any, strict: bool) -> None:
    model = Keyed(collection(kind)).eval()

    def batch(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        keyed = keyed_batch(n, ["a", "b", "c"]).ours
        return keyed.values(), keyed.lengths()

    shapes = ({0: torch.export.Dim.AUTO}, None)
    program = torch.export.export(model, batch(0), dynamic_shapes=shapes, strict=strict)
    assert len(nodes_of(program)) == 1
    for n in range(3):
        assert torch.equal(program.module()(*batch(n)), model(*batch(n)))


def test_an_exported_training_graph_trains_nothing() -> None:
    """torch exports constants without gradients."""
    model = nn.Sequential(embedding())
    program = torch.export.export(model.train(), (ids_of(0, 4),))
    assert nodes_of(program) == ["tierstore.trained_rows.default"]
    found = program.module()(ids_of(1, 4))
    assert torch.equal(found, model[0].rows(ids_of(1, 4)))
    with pytest.raises(RuntimeError, match="does not require grad"):
        found.sum().backward()
    assert model[0].fused_optimizer.num_updates == 0


def test_a_saved_program_finds_the_tables_of_its_process(tmp_path: Any) -> None:
    model = nn.Sequential(bag()).eval()
    program = torch.export.export(model, (ids_of(0, 4, 3),))
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    assert torch.equal(loaded(ids_of(1, 4, 3)), model(ids_of(1, 4, 3)))
