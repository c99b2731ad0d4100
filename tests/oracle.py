"""The float64 references of the ops, which ship for ``mlx-mtp doctor``."""

from mlx_mtp.reference import *  # noqa: F403
