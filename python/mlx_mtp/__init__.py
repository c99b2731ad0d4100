"""Exact multi-token-prediction speculative decoding for MLX."""
