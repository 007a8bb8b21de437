"""Models over embedding bag collections, the plain PyTorch reference for these, and the AUC."""

from tierstore.models.dlrm import DLRM, DCNv2, DLRMTrain
from tierstore.models.metrics import AUC, binary_auc
from tierstore.models.reference import DenseEmbeddingBags

__all__ = ["AUC", "DLRM", "DCNv2", "DLRMTrain", "DenseEmbeddingBags", "binary_auc"]
