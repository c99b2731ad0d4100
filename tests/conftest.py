import pytest

import mlx_mtp


@pytest.fixture(scope="session")
def demo():
    """The embedded model with its head, and its tokenizer."""
    return mlx_mtp.load("demo")
