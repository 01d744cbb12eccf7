"""The encoder cache.

Owns: features by identity, their references, the budget, the order of eviction.
Never: lets a reserved entry look like a ready one, knows a row or a chunk, or evicts what is
referenced.
"""

from vlbatch.cache.encoder_cache import CacheCounters, CacheUsage, EncoderCache
from vlbatch.cache.keys import EntryKey, Features, Reference
from vlbatch.cache.ledger import Ledger

__all__ = [
    "CacheCounters",
    "CacheUsage",
    "EncoderCache",
    "EntryKey",
    "Features",
    "Ledger",
    "Reference",
]
