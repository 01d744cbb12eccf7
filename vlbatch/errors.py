"""Every error the library raises on purpose.

Owns the names of refusals (public vocabulary, see the scenario format) and of broken invariants.
Never raised: a bare ``Exception``, a log line in place of an error.

Rules
- A refusal is raised before anything is written; the object it came from is unchanged.
- Its message says what was got, what was expected, and which setting to change.
- ``InvariantBroken`` is not a refusal: it says that state is wrong and names the ids involved.
"""

from __future__ import annotations


class VlbatchError(Exception):
    """Base of all errors of the library.

    Attributes:
        req_id: the request that was refused, or ``None`` where no single request is meant.
        setting: the setting to change, or ``None``.

    """

    def __init__(
        self, message: str, *, req_id: str | None = None, setting: str | None = None
    ) -> None:
        """Keep the message; prefix it with the request and suffix it with the setting."""
        text = f"request {req_id!r}: {message}" if req_id is not None else message
        if setting is not None:
            text = f"{text} (setting: {setting})"
        super().__init__(text)
        self.req_id = req_id
        self.setting = setting


# -- settings ------------------------------------------------------------------------------------
class InvalidSetting(VlbatchError):
    """A setting of a constructor or a command is out of range, or contradicts another one."""


# -- admission -----------------------------------------------------------------------------------
class DuplicateRequest(VlbatchError):
    """A request with this id is already alive."""


class UnknownRequest(VlbatchError):
    """No request with this id is alive; look-ups never insert."""


class BatchFull(VlbatchError):
    """Every slot of the batch is taken."""


class PromptTooLong(VlbatchError):
    """The prompt does not fit ``max_model_len``."""


class InvalidItem(VlbatchError):
    """An item's span, grid or mask is impossible, or overlaps another item's places."""


class ItemTooLarge(VlbatchError):
    """An item can never fit the encoder cache or the encode budget."""


class PlaceholderMismatch(VlbatchError):
    """The placeholders of an item and its declared feature rows (or its media) disagree."""


# -- fields --------------------------------------------------------------------------------------
class UnknownField(VlbatchError):
    """A field of this name was not declared."""


class InvalidField(VlbatchError):
    """A declaration contradicts itself, or a value has the wrong shape, dtype or length."""


# -- a step --------------------------------------------------------------------------------------
class InvalidSchedule(VlbatchError):
    """Zero or negative tokens, more than remain, or an id that is not in the batch."""


class EncodeBudgetExceeded(InvalidSchedule):
    """The chunks scheduled need more encoding in this step than the budget allows."""


class CacheFull(InvalidSchedule):
    """The chunks scheduled need features for which no cache space can be freed now."""


class EntryInUse(VlbatchError):
    """A cache entry cannot be dropped while a request refers to it."""


class StaleOrder(VlbatchError):
    """A plan, an order or outputs belong to another batch or to another state of it."""


class EncodeFailed(VlbatchError):
    """The encoder raised for an item of this request."""


class FeatureRowsMismatch(VlbatchError):
    """An encoder or a cache entry delivered another number of feature rows than expected."""


# -- media and files -----------------------------------------------------------------------------
class MediaError(VlbatchError):
    """A picture or clip cannot be read or used."""


class MediaTooLarge(MediaError):
    """A picture's or clip's declared size is over the limit; nothing was decoded."""


class RequestFileError(VlbatchError):
    """A request file cannot be read; the message has file and line number."""


# -- runner --------------------------------------------------------------------------------------
class OutOfBlocks(VlbatchError):
    """A single request needs more KV blocks than the pool has."""


class MissingDependency(VlbatchError):
    """An optional package is not installed; the message names the extra that brings it."""


# -- broken invariants -----------------------------------------------------------------------------
class InvariantBroken(VlbatchError):
    """A ``check()`` found state that must not be; the message has the ids and terms."""
