"""Attention tile tables filled on the device, inside a captured graph too."""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources

import numpy as np

from vlbatch.backends.cuda.program import DeviceMemory, Kernels
from vlbatch.graphs.tiles import DECODER_TILE_ROWS, ENCODER_TILE_ROWS, TileShape, TileTables

_NUM_BLOCKS = 4  # three tables and the largest lengths
_SHARED_BYTES = 8 * 256  # a sum a thread

_TABLES = (
    ("decoder_batch_ids", "decoder_tile_ids_per_batch", "decoder_num_blocks"),
    ("encoder_batch_ids", "encoder_tile_ids_per_batch", "encoder_num_blocks_x"),
    ("kv_batch_ids", "kv_tile_ids_per_batch", "kv_num_blocks_x"),
)


def compile_tiles() -> Kernels:
    """Compile ``tiles.cu`` for the current device.

    Raises:
        MissingDependency: a package is not installed.
        InvariantBroken: a call of the driver failed.
    """
    return Kernels(resources.files(__package__).joinpath("tiles.cu").read_text())


class DeviceTileTables:
    """The buffers of ``TileTables`` in device memory, and their ``fill``.

    One launch; nothing is read on the host, allocated or copied. All rows of the shape are read,
    so rows past the step's have lengths of 0. A step with more tiles than a table holds ends in a
    trap of the device: compare with ``max_query_tiles`` before (``GraphDispatcher.choose``).

    Args:
        kernels: from ``compile_tiles``.
        shape: sizes of the tables.
        encoder: address of int32 ``[max_num_seqs]`` as in ``TileTables.fill``.
        decoder: the same.
        this_time: the same.
        stream: handle of the stream to work on, asked at each launch.

    Attributes:
        addresses: name of a buffer of ``TileTables.buffers`` -> its first byte; it never moves.
        num_bytes: of all buffers.
    """

    def __init__(
        self,
        kernels: Kernels,
        shape: TileShape,
        *,
        encoder: int,
        decoder: int,
        this_time: int,
        stream: Callable[[], int],
    ) -> None:
        self._stream = stream
        self._memory: dict[str, DeviceMemory] = {}
        host = TileTables(shape).buffers()
        for name, initial in host.items():
            self._memory[name] = kernels.allocate(initial.nbytes)
            self._memory[name].fill(initial)
        self.addresses = {name: memory.address for name, memory in self._memory.items()}
        self.num_bytes = sum(initial.nbytes for initial in host.values())
        tables = [
            np.array([*(self.addresses[name] for name in names), len(host[names[0]])], np.uint64)
            for names in _TABLES
        ]
        counts = (
            shape.max_num_seqs, shape.group, shape.kv_block, DECODER_TILE_ROWS, ENCODER_TILE_ROWS,
        )  # fmt: skip
        self._launch = kernels.launch(
            "fill_tile_tables",
            *(np.array(address, dtype=np.uint64) for address in (encoder, decoder, this_time)),
            *(np.array(count, dtype=np.int32) for count in counts),
            *tables,
            np.array(self.addresses["max_len"], dtype=np.uint64),
        )

    def fill(self) -> None:
        """Write the tables for the lengths that the device holds then."""
        self._launch(_NUM_BLOCKS, _SHARED_BYTES, self._stream())
