"""Datasets: recorded and generated batches of dense features, ids and labels."""

from tierstore.data.catalog import load, names
from tierstore.data.dataset import Batch, Dataset, TableInfo
from tierstore.data.own_pages import in_own_pages

__all__ = ["Batch", "Dataset", "TableInfo", "in_own_pages", "load", "names"]
