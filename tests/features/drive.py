"""A FeatureStore run step by step, and what each token got, read back from the features' values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
from naive_media import encoded

from vlbatch.cache import EncoderCache, EntryKey, Features
from vlbatch.errors import VlbatchError
from vlbatch.features import Chunk, EncodeTask, EncodeWork, FeatureInputs, FeatureStore
from vlbatch.items import Item
from vlbatch.order import DECODE, EXTEND, PREFILL, BatchOrder, OrderPolicy

Delivered = dict[str, list[tuple[int, str, int]]]
"""req_id -> (token index in the request, item key, feature row), in the order of delivery."""


class Drive:
    """A store, the prompt lengths, and progress as a runner would know it.

    Args:
        max_rows: of the cache.
        settings: of the store.

    """

    def __init__(self, max_rows: int = 1000, **settings: object) -> None:
        self.cache = EncoderCache(max_rows=max_rows)
        self.store = FeatureStore(self.cache, **settings)  # type: ignore[arg-type]  # by tests
        self.prompt_lens: dict[str, int] = {}
        self.computed: dict[str, int] = {}
        self.encoded: list[str] = []

    def add(
        self, req_id: str, prompt_len: int, *items: Item, computed: int = 0, adapter: str = ""
    ) -> None:
        """Admit a request, some of its tokens perhaps from a prefix cache."""
        self.store.add(req_id, items, prompt_len, adapter=adapter)
        self.prompt_lens[req_id] = prompt_len
        self.computed[req_id] = computed

    def chunks(self, scheduled: Mapping[str, int]) -> dict[str, Chunk]:
        """The next tokens of each request."""
        return {req_id: (self.computed[req_id], n) for req_id, n in scheduled.items()}

    def ask(self, **wanted: int) -> dict[str, int]:
        """How many of these tokens fit."""
        return self.store.ask(self.chunks(wanted))

    def reserve(self, **scheduled: int) -> EncodeWork:
        """Plan and reserve."""
        return self.store.reserve(self.store.plan(self.chunks(scheduled)))

    def commit(self, work: EncodeWork) -> dict[str, VlbatchError]:
        """Encode everything that a step needs."""
        self.encoded += [task.key.content for task in work.tasks]
        return self.store.commit(outputs_of(work.tasks))

    def order(self, policy: OrderPolicy = "split", **scheduled: int) -> BatchOrder:
        """The order of a step: decodes first, then in the order given."""
        return order_of(self.chunks(scheduled), self.prompt_lens, policy)

    def gather(self, shift: int = 0, **scheduled: int) -> Delivered:
        """What each token gets."""
        order = self.order(**scheduled)
        return delivered(order, self.store.gather(order, shift=shift), shift)

    def step(self, **scheduled: int) -> Delivered:
        """One whole step, confirmed at its end."""
        work = self.reserve(**scheduled)
        assert self.commit(work) == {}
        got = self.gather(**scheduled)
        self.confirm(**scheduled)
        return got

    def confirm(self, **scheduled: int) -> None:
        """Count tokens as computed for certain."""
        for req_id, num_tokens in scheduled.items():
            self.computed[req_id] += num_tokens
            self.store.confirm(req_id, self.computed[req_id])
        self.store.check()

    def state(self) -> tuple[object, ...]:
        """Everything that a refused or pure verb must leave alone."""
        requests = {
            r: (list(q.held.items()), [id(p) for p in q.items])
            for r, q in self.store._requests.items()
        }
        cache = self.cache
        return (
            requests, list(self.store._waiting.items()), cache.digest(), cache.version,
            cache.usage, repr(cache.counters), list(cache._freed),
        )  # fmt: skip

    @contextmanager
    def refused(
        self,
        error: type[VlbatchError],
        match: str | None = None,
        *,
        req_id: str | None = None,
        setting: str | None = None,
    ) -> Iterator[None]:
        """Expect exactly this error, and a store that is as it was."""
        before = self.state()
        with pytest.raises(error, match=match) as caught:
            yield
        assert type(caught.value) is error
        assert (caught.value.req_id, caught.value.setting) == (req_id, setting)
        assert self.state() == before
        self.store.check()


def outputs_of(tasks: Sequence[EncodeTask]) -> dict[EntryKey, Features]:
    """What an encoder that makes no mistake returns."""
    return {t.key: (encoded(t.key.content, t.placed.num_rows, t.key.epoch),) for t in tasks}


def order_of(
    chunks: Mapping[str, Chunk], prompt_lens: Mapping[str, int], policy: OrderPolicy = "split"
) -> BatchOrder:
    """A batch order made by hand: slot = row."""
    classes = {
        req_id: PREFILL if start == 0 else EXTEND if start < prompt_lens[req_id] else DECODE
        for req_id, (start, _) in chunks.items()
    }
    req_ids = list(chunks)
    if policy != "arrival":
        req_ids.sort(key=lambda req_id: classes[req_id] != DECODE)

    def by_row(values: Mapping[str, int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.array([values[req_id] for req_id in req_ids], dtype=np.int64)

    return BatchOrder(
        batch_id="test",
        step=0,
        policy=policy,
        req_ids=tuple(req_ids),
        idle=(),
        slots=np.arange(len(req_ids)),
        prompt_lens=by_row(prompt_lens),
        computed=by_row({r: start for r, (start, _) in chunks.items()}),
        scheduled=by_row({r: n for r, (_, n) in chunks.items()}),
        classes=by_row(classes),
    )


def delivered(order: BatchOrder, inputs: FeatureInputs, shift: int = 0) -> Delivered:
    """Read back what each token got, from nothing but the arrays."""
    arrays = [np.asarray(array) for array in inputs.arrays()]
    values = np.concatenate(arrays) if arrays else np.zeros((0, 3))
    assert len(values) == len(inputs.tokens), "feature rows and their tokens differ in number"
    got: Delivered = {req_id: [] for req_id in order.req_ids}
    for token, (name, feature_row, _) in zip(inputs.tokens.tolist(), values.tolist(), strict=True):
        row = int(order.row_of_token[token])
        index = int(order.token_indices[token]) + shift
        got[order.req_ids[row]].append((index, name_of(name), int(feature_row)))
    return got


def name_of(number: float) -> str:
    """The key that ``encoded`` wrote."""
    return int(number).to_bytes(8, "big").strip(b"\0").decode()


def run(key: str, first_token: int, first_row: int, count: int) -> list[tuple[int, str, int]]:
    """``count`` consecutive tokens with consecutive rows of one item."""
    return [(first_token + i, key, first_row + i) for i in range(count)]
