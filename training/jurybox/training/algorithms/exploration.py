"""Noise for exploring with a deterministic policy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def coloured_noise(rng: np.random.Generator, steps: int, size: int, colour: float = 1.0) -> npt.NDArray[np.float32]:
    """`steps` values of unit variance for each of `size` actions, (steps, size).

    Its power falls with frequency f as f ** -colour: 0 is white, 1 pink, 2 red. Pink noise keeps a direction long
    enough to get somewhere and still does not drift; it beats white and Ornstein-Uhlenbeck noise over many tasks (O.
    Eberhard et al., "Pink Noise Is All You Need", ICLR 2023). Made as in J. Timmer and M. König (1995): random Fourier
    coefficients of the wanted power.
    """
    if colour == 0:
        return rng.standard_normal((steps, size)).astype(np.float32)
    frequencies = np.fft.rfftfreq(steps)
    # The mean of an episode's noise belongs to it too: it gets the power of the lowest frequency.
    frequencies[0] = 1.0 / steps
    amplitude = frequencies ** (-colour / 2.0)
    real = rng.standard_normal((size, len(amplitude))) * amplitude
    imaginary = rng.standard_normal((size, len(amplitude))) * amplitude
    imaginary[:, 0] = 0.0
    real[:, 0] *= np.sqrt(2.0)
    if steps % 2 == 0:
        imaginary[:, -1] = 0.0
        real[:, -1] *= np.sqrt(2.0)
    power = amplitude**2
    power[1 : -1 if steps % 2 == 0 else None] *= 2.0
    deviation = np.sqrt(2.0 * power.sum()) / steps
    noise: npt.NDArray[np.float64] = np.fft.irfft(real + 1j * imaginary, steps, axis=-1) / deviation
    return np.ascontiguousarray(noise.T, np.float32)
