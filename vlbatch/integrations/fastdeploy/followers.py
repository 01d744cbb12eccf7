"""What follows the core's rows besides a proposer: fields in host memory, and constants."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vlbatch.backends import BACKENDS, Backend, make_backend
from vlbatch.batch import InputBatch as CoreBatch
from vlbatch.batch import ProposerInputBatch as CoreFollower
from vlbatch.batch import own
from vlbatch.errors import InvalidSetting
from vlbatch.fields import Field
from vlbatch.integrations.fastdeploy.fields import HOST_FIELDS
from vlbatch.order import BatchOrder, RowMoves


class AfterReset:
    """Runs a function after every reset of the batch, whoever asked for it.

    Args:
        restore: writes what a reset to the declared defaults cannot.
    """

    def __init__(self, restore: Callable[[], None]) -> None:
        self._restore = restore

    def on_reset(self) -> None:
        """Restore."""
        self._restore()

    def follow(self, moves: RowMoves) -> None:
        """Nothing is by row."""

    def derive(self, order: BatchOrder) -> None:
        """Nothing follows from an order."""

    def write_derived(self, values: object) -> None:
        """Nothing follows from an order."""

    def on_add(self, req_id: str, values: Mapping[str, object]) -> None:
        """Nothing is by request."""

    def on_preempt(self, req_id: str) -> None:
        """Nothing is by request."""

    def on_remove(self, req_id: str) -> None:
        """Nothing is by request."""

    def check(self) -> None:
        """Nothing is kept."""


# Any: the array types are the backend's own business
def split_by_place(
    fields: Sequence[Field], backend: Backend[Any, Any]
) -> tuple[list[Field], list[Field]]:
    """Fields that live on the backend, and those that it would take out of host memory."""
    pinned = [] if backend.on_host else [f for f in fields if f.name in HOST_FIELDS]
    return [f for f in fields if f not in pinned], pinned


# Any: as above
def host_part(
    core: CoreBatch[Any],
    pinned: Sequence[Field],
    backend: Backend[Any, Any],
    host_backend: Backend[Any, Any] | None,
) -> tuple[CoreFollower[Any], ...]:
    """Follow with the fields in host memory, where there are any.

    Raises:
        InvalidSetting: which arrays go with such a backend is not known.
    """
    if not pinned:
        return ()
    if host_backend is None:
        if backend.name not in BACKENDS:
            raise InvalidSetting(
                f"got none for the fields in host memory beside backend {backend.name!r}",
                setting="host_backend",
            )
        host_backend = make_backend(backend.name.removesuffix("-tensor"))
    return (CoreFollower(core, [own(field) for field in pinned], backend=host_backend),)
