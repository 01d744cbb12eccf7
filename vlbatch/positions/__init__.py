"""Rotary positions: what each token of a request rotates by, per model family.

Owns the families' rules, each request's media runs and delta (kept from admission to finish,
through preemption), and the assembly of a step's positions in row order. Memory is 32 bytes a
media run and a few numbers a request and slot.

Never allocates by ``max_model_len``, never decides an order, never reads features, and never turns
a position into a KV slot: those come from token indices.
"""

from __future__ import annotations

from vlbatch.positions.families import FAMILIES, Family, build_runs, family_of
from vlbatch.positions.runs import PositionRuns
from vlbatch.positions.store import PositionStore

__all__ = ["FAMILIES", "Family", "PositionRuns", "PositionStore", "build_runs", "family_of"]
