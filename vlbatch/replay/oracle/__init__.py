"""The oracle: a naive model of what a VL batch must hold.

Owns: a second account of rows, progress, fields, features, positions and cache, in plain dicts and
lists, one token and one occurrence at a time, and the comparison with what the library did.
Never: imports anything of the library outside this folder, or an array library; is fast.
"""

from vlbatch.replay.oracle.fields import FieldRule
from vlbatch.replay.oracle.oracle import Oracle
from vlbatch.replay.oracle.positions import prompt_positions
from vlbatch.replay.oracle.values import (
    FAMILIES,
    FeatureRow,
    Finding,
    ObservedState,
    ObservedStep,
    OracleItem,
    OracleSettings,
)

__all__ = [
    "FAMILIES",
    "FeatureRow",
    "FieldRule",
    "Finding",
    "ObservedState",
    "ObservedStep",
    "Oracle",
    "OracleItem",
    "OracleSettings",
    "prompt_positions",
]
