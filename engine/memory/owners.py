"""Who a byte on a device belongs to; the names are those of the metrics, of the plan and of the admin API."""

from enum import StrEnum


class Owner(StrEnum):
    """Everything on a device is one of these. The order is that of every table."""

    CONTEXT = "context"
    MODULES = "modules"
    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"
    SHADOW = "shadow"
    SCRATCH = "scratch"
    CUBLAS_WORKSPACE = "cublas_workspace"
    CUDA_GRAPHS = "cuda_graphs"
    POOL_CACHED = "pool_cached"
    UNACCOUNTED = "unaccounted"
    """The driver's figure for this process less all others; never charged, whoever knows that figure derives it."""


CHARGED: tuple[Owner, ...] = tuple(owner for owner in Owner if owner is not Owner.UNACCOUNTED)
