"""Features by request.

Owns: each request's items and references, the chunk arithmetic, the plan of a step's encodes, and
the gather of feature rows with the tokens that take them.
Never: indexes anything by batch row outside ``gather``, runs an encoder, or copies features.
"""

from vlbatch.features.chunks import PlacedItem, items_in, uncut_stop
from vlbatch.features.embeds import FeatureSpec
from vlbatch.features.gather import FeatureInputs, Segment
from vlbatch.features.plan import EncodeTask, FeaturePlan
from vlbatch.features.store import Chunk, EncodeWork, FeatureStore

__all__ = [
    "Chunk",
    "EncodeTask",
    "EncodeWork",
    "FeatureInputs",
    "FeaturePlan",
    "FeatureSpec",
    "FeatureStore",
    "PlacedItem",
    "Segment",
    "items_in",
    "uncut_stop",
]
