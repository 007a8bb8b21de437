"""The public names, frozen: a change of this list is a change of what users may rely on."""

from __future__ import annotations

import subprocess
import sys

import tierstore

PUBLIC_NAMES = [
    "Accumulation",
    "ClosedError",
    "ConfigError",
    "DataType",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "GpuError",
    "GradientError",
    "InputError",
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "Offloaded",
    "PolicyFaultError",
    "PoolingType",
    "PrefetchPipeline",
    "RankError",
    "StoreCorruptError",
    "StoreFullError",
    "StoreIOError",
    "StoreLockedError",
    "StoreMismatchError",
    "TableOverride",
    "TierConfig",
    "TierFullError",
    "TierStoreError",
    "TieredEmbedding",
    "TieredEmbeddingBag",
    "__version__",
    "accumulate",
    "offload",
    "prefetch",
    "set_default_config",
    "set_num_threads",
]


def test_the_public_names_are_these() -> None:
    assert sorted(tierstore.__all__) == sorted(PUBLIC_NAMES)


def test_every_public_name_is_there() -> None:
    assert all(getattr(tierstore, name) is not None for name in tierstore.__all__)
    assert set(tierstore.__all__) <= set(dir(tierstore))


def test_importing_tierstore_imports_no_heavy_package() -> None:
    code = "import tierstore, sys; print([m for m in ('torch', 'numpy', 'numba') if m in sys.modules])"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"
