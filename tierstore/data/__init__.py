"""Datasets: recorded and generated batches of dense features, ids and labels."""

from tierstore.data.catalog import load, names
from tierstore.data.dataset import Batch, Dataset, TableInfo

__all__ = ["Batch", "Dataset", "TableInfo", "load", "names"]
