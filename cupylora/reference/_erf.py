"""Complementary error function over arrays, which NumPy lacks, for the exact GELU.

W. J. Cody's rational approximations (Math. Comp. 23, 1969), good to float64 rounding: one on
|x| <= 0.46875 for erf, one up to 4 and one beyond for exp(x²)·erfc.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["erfc"]

Float64 = npt.NDArray[np.float64]

_SMALL = 0.46875
_MIDDLE = 4.0

# Numerator and denominator of each range, highest power first.
_ERF = (
    (
        1.85777706184603153e-1,
        3.16112374387056560e00,
        1.13864154151050156e02,
        3.77485237685302021e02,
        3.20937758913846947e03,
    ),
    (
        1.0,
        2.36012909523441209e01,
        2.44024637934444173e02,
        1.28261652607737228e03,
        2.84423683343917062e03,
    ),
)
_ERFC_MIDDLE = (
    (
        2.15311535474403846e-8,
        5.64188496988670089e-1,
        8.88314979438837594e00,
        6.61191906371416295e01,
        2.98635138197400131e02,
        8.81952221241769090e02,
        1.71204761263407058e03,
        2.05107837782607147e03,
        1.23033935479799725e03,
    ),
    (
        1.0,
        1.57449261107098347e01,
        1.17693950891312499e02,
        5.37181101862009858e02,
        1.62138957456669019e03,
        3.29079923573345963e03,
        4.36261909014324716e03,
        3.43936767414372164e03,
        1.23033935480374942e03,
    ),
)
_ERFC_FAR = (
    (
        1.63153871373020978e-2,
        3.05326634961232344e-1,
        3.60344899949804439e-1,
        1.25781726111229246e-1,
        1.60837851487422766e-2,
        6.58749161529837803e-4,
    ),
    (
        1.0,
        2.56852019228982242e00,
        1.87295284992346725e00,
        5.27905102951428412e-1,
        6.05183413124413191e-2,
        2.33520497626869185e-3,
    ),
)


def erfc(x: Float64) -> Float64:
    """1 - erf(x), relative error near float64 rounding also where the result is tiny."""
    size = np.abs(x)
    with np.errstate(all="ignore"):
        near = 1.0 - size * _ratio(_ERF, size * size)
        middle = np.exp(-size * size) * _ratio(_ERFC_MIDDLE, size)
        inverse = 1.0 / (size * size)
        tail = (1.0 / math.sqrt(math.pi) - inverse * _ratio(_ERFC_FAR, inverse)) / size
        far = np.exp(-size * size) * tail
    positive = np.where(size <= _SMALL, near, np.where(size <= _MIDDLE, middle, far))
    return np.where(x < 0, 2.0 - positive, positive)


def _ratio(coefficients: tuple[Sequence[float], Sequence[float]], x: Float64) -> Float64:
    top, bottom = coefficients
    ratio: Float64 = np.polyval(np.asarray(top), x) / np.polyval(np.asarray(bottom), x)
    return ratio
