"""Features, positions and KV indices that a drafter reads, with images in the prompt."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from vl_batches import begun, delivered, encode_all, make_batch, run

from vlbatch import Item, VLBatch
from vlbatch.errors import InvalidField
from vlbatch.speculative import DrafterRows, shift_tokens

Batch = VLBatch[Any]


def image(key: str, offset: int, length: int, grid: tuple[int, int, int] | None = None) -> Item:
    """An image of a grid, one row by default."""
    return Item(key, "image", offset, length, grid=grid or (1, 1, length))


def held_at(vl: Batch, req_id: str, computed: int, *, in_flight: int = 0) -> bool:
    """Whether anything is still referred to once so many tokens are confirmed."""
    vl.confirm(req_id, computed, in_flight=in_flight)
    vl.check()
    return any(vl.features.cache.references(key) for key in vl.features.cache.present())


def both(vl: Batch, shift: int = 1, **scheduled: int) -> tuple[Any, Any, Any]:
    """One step: features for the target, for the drafter, and what the drafter does without."""
    order = vl.arrange(begun(vl, **scheduled))
    ahead = vl.gather(order, shift=shift)
    got = delivered(order, vl.gather(order)), delivered(order, ahead, shift), ahead.skipped.tolist()
    vl.complete(order)
    vl.check()
    return got


def test_b16_an_image_right_behind_the_chunk() -> None:
    """B16: the drafter of a chunk that ends before an image reads the image's first row."""
    vl = make_batch(lookahead=1)
    vl.add("r", prompt_len=20, items=[image("X", 8, 6)])
    assert vl.ask({"r": 8}) == {"r": 8}
    step = vl.begin({"r": 8})
    assert [task.key.content for task in step.tasks] == ["X"]
    vl.abandon(step)
    target, drafter, skipped = both(vl, r=8)
    assert (target, drafter, skipped) == ({"r": []}, {"r": run("X", 8, 0, 1)}, [])
    target, drafter, skipped = both(vl, r=12)

    assert (target["r"], drafter["r"], skipped) == (run("X", 8, 0, 6), run("X", 9, 1, 5), [])


def test_b16_a_full_cache_shortens_the_chunk() -> None:
    """B16: where the image cannot be had, the chunk ends one token earlier; progress goes on."""
    vl = make_batch(max_rows=6, lookahead=1)
    vl.add("other", prompt_len=12, items=[image("Y", 2, 6)])
    both(vl, other=4)
    vl.add("r", prompt_len=20, items=[image("X", 8, 6)])
    assert vl.ask({"other": 1, "r": 8}) == {"other": 1, "r": 7}
    both(vl, other=1, r=7)

    assert vl.ask({"other": 1, "r": 1}) == {"other": 1, "r": 1}, "at least one token a step"


def test_b18_the_drafter_is_a_reader() -> None:
    """B18: with a look-ahead of one an image is held for one confirmed token more."""
    for lookahead, last_holding in ((0, 13), (1, 14)):
        vl = make_batch(lookahead=lookahead, auto_confirm=False)
        vl.add("r", prompt_len=20, items=[image("X", 8, 6)])
        both(vl, lookahead, r=20)
        assert held_at(vl, "r", last_holding, in_flight=20 - last_holding)
        assert not held_at(vl, "r", last_holding + 1, in_flight=19 - last_holding)


def test_b18_an_image_at_the_chunks_end_that_does_not_fit() -> None:
    """B18: at the boundary the drafter may read no feature; its token is named, nothing fails."""
    vl = make_batch(max_rows=6, lookahead=1)
    vl.add("r", prompt_len=20, items=[image("X", 1, 6), image("Y", 7, 6)])
    assert vl.ask({"r": 7}) == {"r": 6}
    target, drafter, skipped = both(vl, r=6)
    assert (target["r"], drafter["r"], skipped) == (run("X", 1, 0, 5), run("X", 1, 0, 6), [])
    assert vl.ask({"r": 14}) == {"r": 1}
    target, drafter, skipped = both(vl, r=1)

    assert (target["r"], drafter["r"]) == (run("X", 6, 5, 1), [])
    assert skipped == [0], "token 6 of the request, which reads token 7"


def test_shift_beyond_the_lookahead_is_refused() -> None:
    """Features are held for as many tokens ahead as the store was told, no more."""
    vl = make_batch(lookahead=1)
    vl.add("r", prompt_len=4)
    order = vl.arrange(begun(vl, r=4))
    with pytest.raises(InvalidField, match=r"shift 2.*0\.\.1"):
        vl.gather(order, shift=2)


def test_features_of_left_out_rows_are_left_out() -> None:
    """Features for the drafter follow its own tokens; a row that is gone takes its segments."""
    vl = make_batch(lookahead=1, num_drafts=2, policy="arrival")
    vl.add("d", prompt_len=1)
    both(vl, d=1)
    vl.add("a", prompt_len=9, items=[image("X", 2, 4)])
    vl.add("b", prompt_len=9, items=[image("Y", 3, 4)])
    order = vl.arrange(begun(vl, d=3, a=9, b=5))
    ahead = vl.gather(order, shift=1)
    assert order.req_ids == ("d", "a", "b")
    assert ahead.tokens.tolist() == [4, 5, 6, 7, 14, 15, 16]
    rows = DrafterRows.of(order, np.array([1, 0, 0]))  # d has one token less
    mine = rows.features(order, ahead)
    assert mine.tokens.tolist() == [3, 4, 5, 6, 13, 14, 15]
    assert mine.segments == ahead.segments
    rows = DrafterRows.of(order, np.array([0, 0, 0]), skip=[1])
    mine = rows.features(order, ahead)

    assert mine.tokens.tolist() == [3, 4, 5]
    assert [(s.req_id, s.rows) for s in mine.segments] == [("b", (0, 3))]


def test_b20_kv_index_from_the_token_rotary_from_the_delta() -> None:
    """B20: drafts at tokens 40 and 41 write KV there and rotate by 22 and 23, on every axis."""
    vl = make_batch(num_drafts=2)
    vl.add("r", prompt_len=40, items=[image("X", 4, 24, (1, 4, 6))])
    both(vl, 0, r=40)
    order = vl.arrange(begun(vl, r=3))

    assert vl.positions.delta("r") == -18
    assert order.token_indices.tolist() == [40, 41, 42]
    assert divmod(int(order.token_indices[0]), 16) == (2, 8), "block and offset"
    assert vl.positions_of(order).tolist() == [[22, 23, 24]] * 3


def test_b24_mixed_rows_with_drafts() -> None:
    """B24: an image request and a text request with four drafts each get their own positions."""
    vl = make_batch(num_drafts=3)
    vl.add("image", prompt_len=40, items=[image("X", 4, 24, (1, 4, 6))])
    vl.add("text", prompt_len=12)
    both(vl, 0, image=40, text=12)
    order = vl.arrange(begun(vl, image=4, text=4))
    got = vl.positions_of(order)

    assert got.shape == (3, 8)
    assert got.tolist() == [[22, 23, 24, 25, 12, 13, 14, 15]] * 3


def test_m7_the_drafters_positions_are_the_targets() -> None:
    """M7: a drafter of a multimodal target has multimodal positions, chunk by chunk."""
    vl = make_batch(lookahead=1)
    vl.add("r", prompt_len=12, items=[image("X", 3, 6, (1, 2, 3))])
    got = []
    for tokens in (5, 7):
        order = vl.arrange(begun(vl, r=tokens))
        rows = DrafterRows.of(order)
        got.append(vl.positions_of(order)[:, rows.places])
        vl.complete(order)

    assert np.concatenate(got, axis=1).tolist() == [
        [0, 1, 2, 3, 3, 3, 3, 3, 3, 6, 7, 8],
        [0, 1, 2, 3, 3, 3, 4, 4, 4, 6, 7, 8],
        [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7, 8],
    ]


def test_drafter_reads_features_and_text_of_one_token_ahead() -> None:
    """Row i of the drafter reads token i + 1: the feature of a placeholder, else the id."""
    vl = make_batch(lookahead=1)
    vl.add("r", prompt_len=8, items=[image("X", 2, 3)])
    prompt = np.array([10, 11, 999, 999, 999, 15, 16, 17])
    seen: list[tuple[int, str, int] | int] = []
    for start, tokens in ((0, 3), (3, 5)):
        order = vl.arrange(begun(vl, r=tokens))
        ahead = vl.gather(order, shift=1)
        rows = DrafterRows.of(order)
        behind = np.array([[prompt[start + tokens] if start + tokens < 8 else 18]])
        ids = shift_tokens(rows, prompt[start : start + tokens], behind)
        feature_of = dict(zip(ahead.tokens.tolist(), delivered(order, ahead, 1)["r"], strict=True))
        seen += [feature_of[i][:3] if i in feature_of else int(ids[i]) for i in range(tokens)]
        vl.complete(order)

    assert seen == [11, (2, "X", 0), (3, "X", 1), (4, "X", 2), 15, 16, 17, 18]


def test_rejected_drafts_release_nothing_early() -> None:
    """B03: an item goes on confirmed progress only; a roll back finds its features again."""
    vl = make_batch(auto_confirm=False)
    vl.add("r", prompt_len=20, items=[image("X", 10, 8)])
    both(vl, 0, r=20)
    assert held_at(vl, "r", 12)
    target, *_ = both(vl, 0, r=8)
    assert target["r"] == run("X", 12, 2, 6)
    assert held_at(vl, "r", 17, in_flight=3)
    assert not held_at(vl, "r", 18, in_flight=2)


def test_encoder_is_not_asked_twice() -> None:
    """What the look-ahead encoded is found ready by the chunk that holds the image."""
    vl = make_batch(lookahead=1)
    vl.add("r", prompt_len=12, items=[image("X", 4, 4)])
    both(vl, r=4)
    step = vl.begin({"r": 8})

    assert step.tasks == ()
    assert [key.content for key in step.work.held] == ["X"]
    vl.encode(step, encode_all)
