"""What the field storage needs of an array library, and nothing more.

Two array types meet here. *Stored* arrays are what the library moves and clears; *exposed* arrays
are what the user gets. On the host they are numpy arrays and framework tensors over the same
memory; on a device they are one and the same.

Rules
- Every write is in place. No method may give an array a new address.
- Indices are validated by the caller, on the host: frameworks do not all check bounds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from vlbatch.backends.dtypes import HostArray

if TYPE_CHECKING:
    from vlbatch.backends.mover import Mover, RowArrays

S = TypeVar("S")  # stored
E_co = TypeVar("E_co", covariant=True)  # exposed

Indices: TypeAlias = npt.NDArray[np.int64]
Layout: TypeAlias = Literal["auto", "contiguous", "arena"]


class Backend(Protocol[S, E_co]):
    """Arrays of one library in one place.

    Attributes:
        name: for messages and reports.
        on_host: stored arrays are numpy arrays, so arenas are possible.
        preferred_layout: what ``layout="auto"`` means.
    """

    @property
    def name(self) -> str: ...  # noqa: D102 (see Attributes)

    @property
    def on_host(self) -> bool: ...  # noqa: D102

    @property
    def preferred_layout(self) -> Layout: ...  # noqa: D102

    def allocate(self, num_elements: int, dtype: str) -> S:
        """Allocate one zeroed flat block; ``dtype`` is a field dtype."""
        ...

    def view(self, block: S, start: int, shape: tuple[int, ...]) -> S:
        """Contiguous view of ``block[start : start + prod(shape)]`` (elements), same memory."""
        ...

    def expose(self, array: S, dtype: str) -> E_co:
        """Give the user's handle on a stored array, same memory and address."""
        ...

    def fill(self, array: S, value: HostArray) -> None:
        """Set every element to a 0-d value."""
        ...

    def clear(self, array: S, axis: int, start: int, stop: int, default: HostArray) -> None:
        """Set entries ``start:stop`` of axis 0 or 1 to ``default``, broadcast over them."""
        ...

    def write(self, array: S, start: int, values: HostArray) -> None:
        """Copy host values over ``array[start : start + len(values)]`` (axis 0)."""
        ...

    def read(self, array: S, start: int, stop: int) -> HostArray:
        """Host copy of ``array[start:stop]`` (axis 0) without touching the rest of it."""
        ...

    def move(self, array: S, axis: int, destinations: Indices, sources: Indices) -> None:
        """Do ``array[destinations] = array[sources]`` along axis 0 or 1: all reads first."""
        ...

    def move_prefixes(
        self, array: S, widths: Indices, destinations: Indices, sources: Indices
    ) -> None:
        """Copy ``array[sources[i], :widths[i]]`` to row ``destinations[i]``: all reads first.

        The caller guarantees that source and destination are equal past ``widths[i]``, so that
        more may be copied than asked for.
        """
        ...

    def remap(self, array: S, table: Indices) -> None:
        """Replace each value ``v`` by ``table[v]`` where ``0 <= v < len(table)``, else by -1."""
        ...

    def address(self, array: S) -> int:
        """First byte of the array, for stability checks."""
        ...

    def mover(self, rows: RowArrays[S]) -> Mover:
        """Make what moves all row-resident arrays of a batch."""
        ...


def pow2_buckets(widths: Indices) -> list[tuple[int, Indices]]:
    """Group indices of ``widths`` whose width rounds up to the same power of two.

    Returns:
        ``(largest width, indices)`` a bucket; zero widths are left out.
    """
    exponents = np.frexp(np.maximum(widths - 1, 0))[1]
    buckets = []
    for exponent in np.unique(exponents[widths > 0]):
        members = np.flatnonzero((exponents == exponent) & (widths > 0))
        buckets.append((int(widths[members].max()), members))
    return buckets
