"""The Paddle engine against PaddleFormers' own plain forward."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pytest

from vlbatch.errors import (
    FeatureRowsMismatch,
    InvalidField,
    InvalidItem,
    InvalidSetting,
    VlbatchError,
)
from vlbatch.runner._quiet import quiet_libraries
from vlbatch.runner.inputs import MediaPatches, StepInputs

if TYPE_CHECKING:
    from vlbatch.runner.paddle_engine import PaddleEngine

MODEL = Path(__file__).parents[2] / "fixtures" / "tiny-vl"
NUM_BLOCKS, BLOCK_SIZE = 64, 8
TOLERANCE = 1e-4

pytestmark = [
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("paddle", "paddleformers")),
        reason="needs the extra vlbatch[run]",
    ),
    pytest.mark.skipif(not (MODEL / "config.json").is_file(), reason=f"needs {MODEL}"),
]


@dataclass
class Prompt:
    """A request: tokens, rotary positions, features in their places, and its KV blocks."""

    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    feature_places: npt.NDArray[np.int64]
    features: npt.NDArray[np.float32]
    blocks: list[int]

    @property
    def size(self) -> int:
        return self.token_ids.size

    def on(self, blocks: Sequence[int]) -> Prompt:
        return replace(self, blocks=list(blocks))


def make_prompt(rng: np.random.Generator, engine: PaddleEngine, size: int = 45) -> Prompt:
    """Text around two runs of features, with positions as scattered as those of images."""
    places = np.concatenate([np.arange(5, 11), np.arange(size // 2, size // 2 + 8)])
    axes = rng.integers(0, 3, (3, size)).cumsum(axis=1)
    return Prompt(
        token_ids=rng.integers(0, engine.vocab_size, size),
        positions=axes,
        feature_places=places,
        features=rng.standard_normal((places.size, engine.hidden_size), dtype=np.float32),
        blocks=list(range(-(-size // BLOCK_SIZE))),
    )


def make_step(*chunks: tuple[Prompt, int, int]) -> StepInputs:
    """One step over ``(prompt, start, stop)`` chunks that asks for the logits of every token."""
    lengths = [stop - start for _, start, stop in chunks]
    query_start = np.cumsum([0, *lengths]).astype(np.int32)
    width = max(len(prompt.blocks) for prompt, _, _ in chunks)
    tables = [prompt.blocks + [-1] * (width - len(prompt.blocks)) for prompt, _, _ in chunks]
    places, features = [], []
    for first, (prompt, start, stop) in zip(query_start, chunks, strict=False):
        inside = (start <= prompt.feature_places) & (prompt.feature_places < stop)
        places.append(prompt.feature_places[inside] - start + first)
        features.append(prompt.features[inside])
    return StepInputs(
        token_ids=np.concatenate([p.token_ids[start:stop] for p, start, stop in chunks]),
        positions=np.concatenate([p.positions[:, start:stop] for p, start, stop in chunks], axis=1),
        query_start=query_start,
        computed=np.array([start for _, start, _ in chunks], dtype=np.int32),
        block_tables=np.array(tables, dtype=np.int32),
        feature_tokens=np.concatenate(places),
        features=features,
        logit_tokens=np.arange(query_start[-1], dtype=np.int64),
    )


def run_alone(engine: PaddleEngine, prompt: Prompt) -> npt.NDArray[np.float32]:
    """The logits of every token, the whole prompt in one step."""
    return engine.forward(make_step((prompt, 0, prompt.size)))


def cache_state(engine: PaddleEngine) -> npt.NDArray[np.float32]:
    cache = engine._cache
    return np.stack([tensor.numpy() for tensor in (*cache.keys, *cache.values)])


@pytest.fixture
def make_engine() -> Callable[[], PaddleEngine]:
    """Each call loads an engine with an empty cache."""
    from vlbatch.runner.paddle_engine import PaddleEngine

    return lambda: PaddleEngine(MODEL, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)


@pytest.fixture
def engine(make_engine: Callable[[], PaddleEngine]) -> PaddleEngine:
    return make_engine()


@pytest.fixture(scope="module")
def plain_forward() -> Callable[[Prompt], npt.NDArray[np.float32]]:
    """The oracle: PaddleFormers' own causal forward, features written into a numpy array."""
    from vlbatch.runner.paddle_engine import load_model

    with quiet_libraries():
        import paddle

    model = load_model(MODEL)

    def forward(prompt: Prompt) -> npt.NDArray[np.float32]:
        text = model.model.language_model
        with paddle.no_grad():
            embeddings = text.embed_tokens.weight.numpy()[prompt.token_ids]
            embeddings[prompt.feature_places] = prompt.features
            hidden = text(
                inputs_embeds=paddle.to_tensor(embeddings[None]),
                position_ids=paddle.to_tensor(prompt.positions[:, None]),
                use_cache=False,
                return_dict=True,
            ).last_hidden_state
            logits: npt.NDArray[np.float32] = model.lm_head(hidden).numpy()[0]
        return logits

    return forward


class TestForward:
    @pytest.mark.parametrize("seed", [0, 1])
    def test_whole_prompt_equals_plain_forward(self, engine, plain_forward, seed):
        """A prompt in one step gives the logits of PaddleFormers' own attention."""
        prompt = make_prompt(np.random.default_rng(seed), engine)

        np.testing.assert_allclose(run_alone(engine, prompt), plain_forward(prompt), atol=TOLERANCE)

    @pytest.mark.parametrize("chunk", [1, 7, 8, 20])
    def test_chunks_equal_plain_forward(self, engine, plain_forward, chunk):
        """Chunks of any size, on scattered blocks, cutting features and blocks, change nothing."""
        prompt = make_prompt(np.random.default_rng(2), engine).on([40, 3, 17, 63, 0, 8])

        logits = [
            engine.forward(make_step((prompt, start, min(start + chunk, prompt.size))))
            for start in range(0, prompt.size, chunk)
        ]

        np.testing.assert_allclose(np.concatenate(logits), plain_forward(prompt), atol=TOLERANCE)

    @pytest.mark.parametrize("seed", [3, 4, 5])
    def test_mixed_steps_equal_alone(self, engine, plain_forward, seed):
        """A request in a mixed batch, in any row order and any blocks, gets what it gets alone."""
        rng = np.random.default_rng(seed)
        prompts = [make_prompt(rng, engine, size) for size in (30, 37, 38, 45, 52)]
        blocks = rng.permutation(NUM_BLOCKS).reshape(-1, 8)
        prompts = [prompt.on(own) for prompt, own in zip(prompts, blocks, strict=False)]
        expected = [plain_forward(prompt) for prompt in prompts]
        done = [0] * len(prompts)

        while any(done[i] < prompt.size for i, prompt in enumerate(prompts)):
            rows = [i for i in rng.permutation(len(prompts)) if done[i] < prompts[i].size]
            sizes = [min(rng.choice([1, 1, 4, 11]), prompts[i].size - done[i]) for i in rows]
            step = [(prompts[i], done[i], done[i] + n) for i, n in zip(rows, sizes, strict=True)]
            logits = engine.forward(make_step(*step))

            for row, part in zip(rows, np.split(logits, np.cumsum(sizes)[:-1]), strict=True):
                want = expected[row][done[row] : done[row] + len(part)]
                np.testing.assert_allclose(part, want, atol=TOLERANCE, err_msg=f"{seed=} {row=}")
                done[row] += len(part)

    def test_rows_without_tokens_are_skipped(self, engine):
        """A row that schedules nothing needs no block and changes nothing for the others."""
        rng = np.random.default_rng(6)
        first, idle, last = (make_prompt(rng, engine) for _ in range(3))
        first, idle, last = first.on(range(6)), idle.on([]), last.on(range(6, 12))
        expected = run_alone(engine, last)

        logits = engine.forward(make_step((first, 0, first.size), (idle, 0, 0), (last, 0, 45)))

        np.testing.assert_allclose(logits[first.size :], expected, atol=TOLERANCE)

    def test_shared_prefix_blocks_are_only_read(self, engine):
        """Two requests may read one request's prefix blocks and go on in blocks of their own."""
        prompt = make_prompt(np.random.default_rng(7), engine)
        expected = run_alone(engine, prompt)[16:]
        twin = prompt.on([0, 1, 20, 21, 22, 23])

        logits = engine.forward(make_step((prompt, 16, prompt.size), (twin, 16, prompt.size)))

        for part in np.split(logits, 2):
            np.testing.assert_allclose(part, expected, atol=TOLERANCE)

    def test_reused_blocks_do_not_leak(self, engine, plain_forward):
        """A request on the blocks of a finished, longer one reads nothing of it."""
        rng = np.random.default_rng(8)
        old, new = make_prompt(rng, engine, 48), make_prompt(rng, engine, 33)
        run_alone(engine, old.on([5, 4, 3, 2, 1, 0]))

        logits = run_alone(engine, new.on([2, 5, 0, 1, 4]))

        np.testing.assert_allclose(logits, plain_forward(new), atol=TOLERANCE)

    def test_poisoned_slots_are_never_read(self, engine, plain_forward):
        """NaN in every slot that a step has not written reaches no logit, padded rows included."""
        rng = np.random.default_rng(9)
        short, long = make_prompt(rng, engine, 30), make_prompt(rng, engine, 45)
        short, long = short.on([9, 2, 33, 7]), long.on([8, 50, 1, 60, 12, 13])
        for tensor in (*engine._cache.keys, *engine._cache.values):
            tensor.set_value(np.full(tensor.shape, np.nan, dtype=np.float32))

        engine.forward(make_step((short, 0, 29), (long, 0, 44)))
        logits = engine.forward(make_step((short, 29, 30), (long, 44, 45)))

        expected = np.stack([plain_forward(short)[-1], plain_forward(long)[-1]])
        np.testing.assert_allclose(logits, expected, atol=TOLERANCE)

    def test_only_wanted_logits_are_returned(self, engine):
        """``logit_tokens`` picks tokens in the order given; none gives an empty array."""
        prompt = make_prompt(np.random.default_rng(10), engine)
        step = make_step((prompt, 0, prompt.size))
        every = engine.forward(step)

        some = engine.forward(replace(step, logit_tokens=np.array([44, 0, 7])))
        none = engine.forward(replace(step, logit_tokens=np.array([], dtype=np.int64)))

        np.testing.assert_allclose(some, every[[44, 0, 7]], atol=TOLERANCE)
        assert (some.dtype, none.shape) == (np.float32, (0, engine.vocab_size))

    def test_cache_is_written_in_place(self, engine):
        """Steps keep the cache's addresses and write the step's slots alone."""
        prompt = make_prompt(np.random.default_rng(11), engine, 43).on([3, 0, 9, 2, 30, 31])
        cache = engine._cache
        addresses = [tensor.data_ptr() for tensor in (*cache.keys, *cache.values)]

        run_alone(engine, prompt)

        assert [tensor.data_ptr() for tensor in (*cache.keys, *cache.values)] == addresses
        written = np.flatnonzero((cache_state(engine) != 0).any(axis=(0, 2, 3)))
        slots = [block * BLOCK_SIZE + offset for block in prompt.blocks for offset in range(8)]
        assert written.tolist() == sorted(slots[:43])

    def test_engines_share_nothing(self, make_engine):
        """Two engines in one process, used in turns, keep their own caches."""
        first, second = make_engine(), make_engine()
        rng = np.random.default_rng(12)
        ours, theirs = make_prompt(rng, first), make_prompt(rng, first)
        expected = run_alone(first, ours)[20:]

        first.forward(make_step((ours, 0, 20)))
        run_alone(second, theirs)
        logits = first.forward(make_step((ours, 20, ours.size)))

        np.testing.assert_allclose(logits, expected, atol=TOLERANCE)

    def test_tokens_embed_as_rows_of_the_weight(self, engine):
        """The pad token embeds as its row like any other token; Paddle's layer makes it zeros."""
        ids = np.arange(engine.vocab_size)
        prompt = Prompt(ids, np.tile(ids, (3, 1)), np.arange(0), np.zeros((0, 1)), list(range(8)))
        rows = np.random.default_rng(22).standard_normal(
            (ids.size, engine.hidden_size), dtype=np.float32
        )
        engine._language_model.embed_tokens.weight.set_value(rows)

        embeddings = engine._embed(make_step((prompt, 0, ids.size)), [])

        np.testing.assert_array_equal(embeddings.numpy(), rows)


class TestFeatures:
    def test_placeholder_ids_do_not_matter(self, engine):
        """Features replace the embeddings of their places whatever ids stand there."""
        prompt = make_prompt(np.random.default_rng(13), engine)
        other_ids = prompt.token_ids.copy()
        other_ids[prompt.feature_places] = 3

        np.testing.assert_array_equal(
            run_alone(engine, replace(prompt, token_ids=other_ids)), run_alone(engine, prompt)
        )

    def test_a_shift_by_one_token_is_seen(self, engine):
        """Features one place off move the logits by far more than the tolerance."""
        prompt = make_prompt(np.random.default_rng(14), engine)
        shifted = replace(prompt, feature_places=prompt.feature_places + 1)

        moved = np.abs(run_alone(engine, shifted) - run_alone(engine, prompt)).max()

        assert moved > 100 * TOLERANCE

    def test_engine_tensors_equal_host_arrays(self, engine):
        """Slices of encoder outputs and host arrays of the same rows give the same logits."""
        rng = np.random.default_rng(15)
        (rows,) = engine.encode([make_item(rng, (1, 4, 8))])
        prompt = make_prompt(rng, engine)
        prompt = replace(prompt, feature_places=np.arange(9, 15), features=rows.numpy()[1:7])
        step = make_step((prompt, 0, prompt.size))

        logits = engine.forward(replace(step, features=[rows[1:3], rows[3:7]]))

        np.testing.assert_array_equal(logits, engine.forward(step))

    @pytest.mark.parametrize("rows", [13, 15])
    def test_wrong_row_count_is_refused(self, engine, rows):
        """Too few or too many rows are refused before anything is written."""
        prompt = make_prompt(np.random.default_rng(16), engine)
        step = make_step((prompt, 0, prompt.size))
        features = [np.zeros((rows, engine.hidden_size), dtype=np.float32)]

        with pytest.raises(FeatureRowsMismatch, match=f"{rows} feature rows for 14 placeholder"):
            engine.forward(replace(step, features=features))
        assert not cache_state(engine).any()

    def test_wrong_width_is_refused(self, engine):
        """Rows of another width than the model's are refused."""
        prompt = make_prompt(np.random.default_rng(17), engine)
        step = make_step((prompt, 0, prompt.size))

        with pytest.raises(FeatureRowsMismatch, match=r"\(14, 5\)"):
            engine.forward(replace(step, features=[np.zeros((14, 5), dtype=np.float32)]))


class TestRefusedSteps:
    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("token_ids", np.full(45, 10**6)),
            ("token_ids", np.full(45, -1)),
            ("positions", np.zeros((3, 44), dtype=np.int64)),
            ("query_start", np.array([0, 44], dtype=np.int32)),
            ("computed", np.array([-1], dtype=np.int32)),
            ("computed", np.array([4], dtype=np.int32)),
            ("block_tables", np.array([[0, 1, 2, 3, 4, -1]], dtype=np.int32)),
            ("block_tables", np.array([[0, 1, 2, 3, 4, NUM_BLOCKS]], dtype=np.int32)),
            ("block_tables", np.array([[0, 1, 2, 3, 4, 4]], dtype=np.int32)),
            ("feature_tokens", np.arange(32, 46)),
            ("feature_tokens", np.array([3] * 14)),
            ("logit_tokens", np.array([45])),
            ("logit_tokens", np.array([-1])),
        ],
    )
    def test_bad_index_is_refused(self, engine, name, value):
        """An index or shape out of bounds is refused by name before anything is written."""
        prompt = make_prompt(np.random.default_rng(18), engine)
        step = make_step((prompt, 0, prompt.size))
        # A context that outgrows its blocks is reported as the table being too narrow.
        reported = "block_tables" if name == "computed" and value[0] > 0 else name

        with pytest.raises(InvalidField, match=f"^{reported}: got .*, expected "):
            engine.forward(replace(step, **{name: value}))
        assert not cache_state(engine).any()

    def test_step_without_tokens_is_refused(self, engine):
        """A step needs at least one token."""
        prompt = make_prompt(np.random.default_rng(19), engine)

        with pytest.raises(InvalidField, match="at least one token"):
            engine.forward(make_step((prompt, 0, 0)))


def make_item(rng: np.random.Generator, grid_thw: tuple[int, int, int]) -> MediaPatches:
    patches = rng.standard_normal((np.prod(grid_thw), 3 * 2 * 14 * 14), dtype=np.float32)
    return MediaPatches(patches, grid_thw, "image" if grid_thw[0] == 1 else "video")


class TestEncode:
    def test_batch_equals_alone(self, engine):
        """Images and clips of all sizes encoded together give each item's own rows."""
        rng = np.random.default_rng(20)
        grids = [(1, 4, 4), (3, 2, 6), (1, 6, 10), (1, 2, 2)]
        items = [make_item(rng, grid) for grid in grids]

        together = engine.encode(items)

        assert [tuple(rows.shape) for rows in together] == [
            (t * h * w // 4, engine.hidden_size) for t, h, w in grids
        ]
        for item, rows in zip(items, together, strict=True):
            (alone,) = engine.encode([item])
            np.testing.assert_allclose(rows.numpy(), alone.numpy(), atol=1e-5)

    def test_items_own_their_memory(self, engine):
        """No two items share a buffer, which would live as long as the last of them."""
        rng = np.random.default_rng(21)
        first, second = engine.encode([make_item(rng, (1, 4, 4)), make_item(rng, (1, 4, 4))])

        assert not first._is_shared_buffer_with(second)
        assert first[0]._is_shared_buffer_with(first[1])  # the probe sees shared memory

    def test_no_items(self, engine):
        """No items give no arrays."""
        assert engine.encode([]) == []

    @pytest.mark.parametrize(
        ("grid", "num_patches", "message"),
        [((1, 4, 3), 12, "multiples of 2"), ((0, 4, 4), 0, "grid"), ((1, 4, 4), 15, "patches")],
    )
    def test_bad_item_is_refused(self, engine, grid, num_patches, message):
        """A grid that cannot merge, an empty one, or patches that do not fill it are refused."""
        item = MediaPatches(np.zeros((num_patches, 1176), dtype=np.float32), grid, "image")

        with pytest.raises(InvalidItem, match=message):
            engine.encode([item])


class TestLoading:
    def test_model_folder_is_only_read(self, make_engine):
        """Loading leaves the model folder as it was."""
        before = {path: path.stat().st_mtime_ns for path in MODEL.rglob("*")}

        make_engine()

        assert {path: path.stat().st_mtime_ns for path in MODEL.rglob("*")} == before

    @pytest.mark.parametrize(
        ("files", "message"),
        [
            ({}, "no config.json"),
            ({"config.json": "{"}, "not JSON"),
            ({"config.json": "[]"}, "model_type None"),
            ({"config.json": '{"model_type": "llama"}'}, "model_type 'llama'"),
            ({"config.json": (MODEL / "config.json")}, "no .*safetensors"),
            (
                {"config.json": (MODEL / "config.json"), "model.safetensors": "cut"},
                "cannot load",
            ),
        ],
        ids=["empty", "broken", "list", "other-model", "no-weights", "broken-weights"],
    )
    def test_bad_folder_is_refused(self, tmp_path, files, message):
        """A folder that holds no Qwen2.5-VL is refused with the setting to change."""
        from vlbatch.runner.paddle_engine import PaddleEngine

        for name, content in files.items():
            text = content.read_text() if isinstance(content, Path) else content
            (tmp_path / name).write_text(text)

        with pytest.raises(VlbatchError, match=message) as caught:
            PaddleEngine(tmp_path, num_blocks=1, block_size=1)
        assert caught.value.setting == "model"

    def test_sliding_window_is_refused(self, tmp_path):
        """A model whose text layers slide is refused: the paged attention is full attention."""
        from vlbatch.runner.paddle_engine import load_model

        config = json.loads((MODEL / "config.json").read_text())
        layers = config["text_config"]["num_hidden_layers"]
        config["text_config"] |= {"use_sliding_window": True, "sliding_window": 8}
        config["text_config"]["layer_types"] = ["sliding_attention"] * layers
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "model.safetensors").symlink_to(MODEL / "model.safetensors")

        with pytest.raises(VlbatchError, match="sliding-window"):
            load_model(tmp_path)

    def test_unknown_device_is_refused(self):
        """A device that Paddle does not have is refused with the setting to change."""
        from vlbatch.runner.paddle_engine import PaddleEngine

        with pytest.raises(VlbatchError, match="no device 'abacus'") as caught:
            PaddleEngine(MODEL, num_blocks=1, block_size=1, device="abacus")
        assert caught.value.setting == "device"

    @pytest.mark.parametrize("sizes", [(0, 8), (8, 0)])
    def test_empty_cache_is_refused(self, sizes):
        """A cache needs a block and a block needs a token."""
        from vlbatch.runner.paddle_engine import PaddleEngine

        with pytest.raises(InvalidSetting, match="at least one of each"):
            PaddleEngine(MODEL, num_blocks=sizes[0], block_size=sizes[1])


def run_python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


class TestProcess:
    def test_nothing_is_printed(self):
        """Import, load and encode print nothing and leave the root logger as it was."""
        result = run_python(
            "import logging, numpy as np\n"
            "from pathlib import Path\n"
            "from vlbatch.runner.paddle_engine import PaddleEngine\n"
            "from vlbatch.runner.inputs import MediaPatches\n"
            f"engine = PaddleEngine(Path({str(MODEL)!r}), num_blocks=2, block_size=2)\n"
            "engine.encode([MediaPatches(np.zeros((4, 1176), 'f4'), (1, 2, 2), 'image')])\n"
            "assert logging.root.handlers == [] and logging.root.level == logging.WARNING\n",
            OMP_NUM_THREADS="2",  # Paddle prints a warning about it
        )

        assert (result.returncode, result.stdout, result.stderr) == (0, "", "")

    def test_missing_package_names_the_extra(self):
        """Without PaddleFormers the import raises MissingDependency, which names the extra."""
        result = run_python(
            "import sys\n"
            "sys.modules['paddleformers'] = None\n"
            "from vlbatch.errors import MissingDependency\n"
            "try:\n"
            "    import vlbatch.runner.paddle_engine\n"
            "except MissingDependency as error:\n"
            "    print(error)\n"
        )

        assert "paddleformers" in result.stdout, result.stderr
        assert "vlbatch[run]" in result.stdout
