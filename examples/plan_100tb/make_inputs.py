"""Writes tables.yaml: a 100 TB model with the shape and skew of Criteo 1 TB's click logs.

The 26 tables have the rows of MLPerf's DCNv2 (five tables hold nearly all of them), its multi-hot sizes as
pooling factors, and dimension 256; the five large ones are scaled until weights and row-wise Adagrad state
take 100 TB. Skew: Zipf-Mandelbrot s = 1.1, q = 100, a fit of one batch of Meta's published tables (see
docs/planner.md). We know of no published exponents of Criteo's tables, so that is an assumption.
"""

from __future__ import annotations

from pathlib import Path

import yaml

from tierstore.planner import TableSpec

DIM, TOTAL = 256, 100e12
ROWS = (
    *(40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10),
    *(2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36),
)
POOLING_FACTORS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)


def tables() -> list[dict]:
    """Make the mappings for ``tierstore plan --tables``."""
    size = TableSpec("row", 1, DIM, optimizer="rowwise_adagrad").row_bytes()
    small = sum(rows for rows in ROWS if rows < 40_000_000) * size
    scaled = int((TOTAL - small) / size / ROWS.count(40_000_000))
    return [
        {
            "name": f"cat_{i}",
            "num_embeddings": scaled if rows == 40_000_000 else rows,
            "embedding_dim": DIM,
            "feature_names": [f"cat_{i}"],
            "pooling_factor": pooling_factor,
            "optimizer": "rowwise_adagrad",
            "popularity": {"s": 1.1, "q": 100.0},
        }
        for i, (rows, pooling_factor) in enumerate(zip(ROWS, POOLING_FACTORS, strict=True))
    ]


if __name__ == "__main__":
    path = Path(__file__).parent / "tables.yaml"
    path.write_text(yaml.safe_dump(tables(), sort_keys=False, default_flow_style=None, width=200))
    print(path)
