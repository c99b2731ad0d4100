"""The array operations. The only module that imports the extension."""

# First, so that the extension finds libmlx and the type mx.array.
import mlx.core as mx

from . import _build

if mx.__version__ != _build.mlx_version:
    raise ImportError(
        f"mlx_mtp was built for mlx {_build.mlx_version}, but mlx {mx.__version__} "
        f'is installed. Run: pip install "mlx=={_build.mlx_version}", or reinstall '
        "mlx-mtp."
    )

from ._ext import (
    commit_rows,
    eval,
    gated_delta_replay,
    sample,
    verify_coupled,
    verify_draft,
)

__all__ = [
    "commit_rows",
    "eval",
    "gated_delta_replay",
    "sample",
    "verify_coupled",
    "verify_draft",
]
