"""The table of rotary angles: cosines and sines for every position, computed once.

Frequencies follow RoFormer (Su et al. 2021); ``linear`` is position interpolation (Chen et al. 2023); ``llama3`` is the
frequency-dependent scaling published with Llama 3.1; ``yarn`` is YaRN (Peng et al. 2023); ``longrope`` is
LongRoPE (Ding et al. 2024). Pairs are (i, i +
head_dim/2), as in Hugging Face checkpoints.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from kvrelay.executors.torch.config import RopeConfig

Float32Array = npt.NDArray[np.float32]


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Float32Array:
    """The angle per position of each pair, [head_dim / 2] float32."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies: Float32Array = (np.float32(1.0) / np.power(np.float32(config.theta), exponents)).astype(np.float32)
    if config.kind == "linear":
        frequencies = (frequencies / np.float32(config.factor)).astype(np.float32)
    if config.kind == "llama3":
        return _llama3(frequencies, config)
    if config.kind == "longrope":
        frequencies = (frequencies / np.asarray(config.pair_factors, dtype=np.float32)).astype(np.float32)
    if config.kind == "yarn":
        return _yarn(frequencies, config, head_dim)
    return frequencies


def rope_table(config: RopeConfig, head_dim: int, num_positions: int) -> Float32Array:
    """cos in [:, 0, :] and sin in [:, 1, :] of a [num_positions, 2, head_dim / 2] float32 array."""
    positions = np.arange(num_positions, dtype=np.float32)
    angles = np.outer(positions, inverse_frequencies(config, head_dim)).astype(np.float32)
    table: Float32Array = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    return table * np.float32(config.attention_factor)


def _llama3(frequencies: Float32Array, config: RopeConfig) -> Float32Array:
    """Keep short wavelengths, divide long ones by ``factor``, blend in between."""
    wavelengths = 2 * math.pi / frequencies
    low = config.original_max_position / config.low_freq_factor
    high = config.original_max_position / config.high_freq_factor
    blend = (config.original_max_position / wavelengths - config.low_freq_factor) / (
        config.high_freq_factor - config.low_freq_factor
    )
    scaled = frequencies / config.factor
    between = (1 - blend) * scaled + blend * frequencies
    result: Float32Array = np.where(
        wavelengths > low, scaled, np.where(wavelengths < high, frequencies, between)
    ).astype(np.float32)
    return result


def _yarn(frequencies: Float32Array, config: RopeConfig, head_dim: int) -> Float32Array:
    """Keep pairs that rotate often within the original context, divide those that rotate little, blend in between."""

    def pair_that_turns(num_rotations: float) -> float:
        """The (fractional) number of the pair that makes this many rotations within the original context."""
        wavelength = config.original_max_position / (num_rotations * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(config.theta))

    first, last = pair_that_turns(config.beta_fast), pair_that_turns(config.beta_slow)
    if config.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    pairs = np.arange(head_dim // 2, dtype=np.float32)
    divided = np.clip((pairs - first) / ((last - first) or 0.001), 0, 1).astype(np.float32)
    result: Float32Array = (frequencies * (1 - divided) + frequencies / np.float32(config.factor) * divided).astype(
        np.float32
    )
    return result
