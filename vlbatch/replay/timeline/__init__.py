"""A picture of a trace: rows over steps.

Owns: the timeline as data, its layout, and three renderers. Never: decides what is right beyond
playing the file on the library, needs a server, a font file or a network.
"""

from vlbatch.replay.timeline.build import build_timeline, read_orders
from vlbatch.replay.timeline.model import Cell, Column, Piece, Timeline

__all__ = ["Cell", "Column", "Piece", "Timeline", "build_timeline", "read_orders"]
