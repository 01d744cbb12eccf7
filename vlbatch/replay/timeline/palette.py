"""Colours: two themes, and one colour for each request that is readable on both."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

Theme = Mapping[str, str]

LIGHT: Final[Theme] = MappingProxyType(
    {
        "page": "#ffffff",
        "panel": "#f5f6f8",
        "grid": "#dde1e6",
        "muted": "#6a737d",
        "ink": "#1b1f24",
        "on_ink": "#ffffff",
        "on_colour": "#1b1f24",
        "fault": "#d1002f",
    }
)
DARK: Final[Theme] = MappingProxyType(
    {
        "page": "#0e1116",
        "panel": "#171b22",
        "grid": "#2c333d",
        "muted": "#97a1ad",
        "ink": "#e8edf3",
        "on_ink": "#0e1116",
        "on_colour": "#0e1116",
        "fault": "#ff4d6d",
    }
)
THEMES: Final = MappingProxyType({"light": LIGHT, "dark": DARK})

REGION_OPACITY: Final = MappingProxyType(
    {"decode": 0.42, "extend": 0.72, "prefill": 1.0, "idle": 0.14}
)
"""The more of a prompt a request computes, the stronger its colour."""


def request_colour(number: int) -> str:
    """Colour of a request: hues a golden angle apart, so that neighbours differ most.

    Lightness and chroma are constant in OKLCH (Ottosson, 2020), with a second ring of both for
    every other turn.
    """
    hue = math.radians(number * 137.50776 + 250)
    lightness, chroma = ((0.70, 0.135), (0.62, 0.12))[number // 9 % 2]
    return oklch(lightness, chroma, hue)


def oklch(lightness: float, chroma: float, hue: float) -> str:
    """Convert to ``#rrggbb``; what sRGB cannot show is clipped."""
    a, b = chroma * math.cos(hue), chroma * math.sin(hue)
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    linear = (
        4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
    )
    return "#" + "".join(f"{round(255 * _gamma(min(max(c, 0.0), 1.0))):02x}" for c in linear)


def _gamma(c: float) -> float:
    return 12.92 * c if c <= 0.0031308 else 1.055 * c ** (1 / 2.4) - 0.055
