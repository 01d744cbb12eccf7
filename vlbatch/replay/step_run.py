"""One step of the library, observed; and the values that a runner would write after it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from vlbatch import BatchOrder, EntryKey, Step, VlbatchError
from vlbatch.cache import Features
from vlbatch.features import FeatureInputs
from vlbatch.replay.observe import observe_order, plain
from vlbatch.replay.oracle import ObservedStep
from vlbatch.replay.oracle.values import FeatureValue
from vlbatch.replay.scenario import Step as StepEvent
from vlbatch.replay.synthetic import NUM_LEVELS
from vlbatch.replay.world import World


@dataclass(slots=True)
class StepRun:
    """A step that was carried out.

    Attributes:
        seen: for the oracle.
        failed: request -> reason.
        failing: content -> name of the reason why its encode failed.
        needed_by: contents encoded -> requests that refer to them, in the order of the schedule.

    """

    seen: ObservedStep
    failed: dict[str, VlbatchError]
    failing: dict[str, str] = field(default_factory=dict)
    needed_by: dict[str, list[str]] = field(default_factory=dict)


class EncoderDown(RuntimeError):
    """What the synthetic encoder raises when the file tells it to."""


def run_step(world: World, step: Step, event: StepEvent) -> StepRun:
    """Carry out a step that was begun, or give it up, and take down what it did."""
    vl = world.vl
    seen = ObservedStep(
        hits=plain(step.work.hits), held=plain(step.work.held), evicted=plain(step.work.evicted)
    )
    run = StepRun(seen, step.failed)
    _encode(world, step, run, event.abandon)
    seen.failed = {req_id: type(error).__name__ for req_id, error in step.failed.items()}
    if event.abandon is not None:
        vl.abandon(step)
        world.num_steps += 1
        return run
    order = vl.arrange(step)
    world.num_steps += 1
    observe_order(seen, vl, order)
    seen.moved = world.witness.num_moved
    target = vl.gather(order)
    follower = vl.gather(order, shift=vl.features.lookahead)
    seen.features = _read(world, target)
    seen.draft_features = _read(world, follower)
    seen.skipped = follower.skipped.tolist()
    seen.positions = vl.positions_of(order).tolist()
    seen.restored = order.restore(list(order.req_ids))
    if world.last is not None:
        seen.restored_late = world.last.restore(list(world.last.req_ids))
    world.last = order
    vl.complete(order, {r: n for r, n in event.accept.items() if r in order.req_ids})
    return run


def _encode(world: World, step: Step, run: StepRun, only: tuple[str, ...] | None) -> None:
    """Encode item by item, so that one that fails takes no other with it."""
    outputs: dict[EntryKey, Features] = {}
    errors: dict[EntryKey, Exception] = {}
    for task in step.tasks:
        content = task.key.content
        if only is not None and content not in only:
            continue
        users = world.vl.features.cache.references(task.key)
        run.needed_by[content] = [r for r in step.scheduled if any(u.req_id == r for u in users)]
        occurrence = (task.reference.req_id, task.reference.item)
        rows = world.delivers.get(occurrence, task.placed.num_rows)
        if content in world.fail_next:
            world.fail_next.discard(content)
            run.failing[content] = "EncodeFailed"
            errors[task.key] = EncoderDown(f"told to fail for {content!r}")
            continue
        outputs[task.key] = world.encoder.encode(task.key, rows)
        if rows != task.placed.num_rows:
            run.failing[content] = "FeatureRowsMismatch"
        else:
            run.seen.encoded += plain([task.key])
    world.vl.commit(step, outputs, errors)
    world.mirror.update(run.seen.encoded)


def _read(world: World, inputs: FeatureInputs) -> list[list[tuple[int, FeatureValue]]]:
    return [world.encoder.read(inputs, level) for level in range(NUM_LEVELS)]


def write_outputs(world: World, order: BatchOrder) -> None:
    """Write what a runner would: sampled tokens, blocks, drafts, and fields that point at rows."""
    batch, fields = world.vl.batch, world.oracle.fields
    for row, req_id in enumerate(order.req_ids):
        tag = world.num_steps * 32 + row
        for name in ("token_ids", "block_table"):
            if batch.length(req_id, name) < batch.registry[name].shape[0]:
                batch.append(req_id, name, tag)
                fields.append(req_id, name, tag)
            else:  # start anew, shorter
                batch.write(req_id, name, [tag])
                fields.write(req_id, name, [tag])
        for name in ("draft_token_ids", "draft_probs"):
            shape = batch.registry[name].row_shape(world.num_drafts)
            value = np.full(shape, tag % 30000)
            batch.write(req_id, name, value)
            fields.write(req_id, name, value.tolist())
        for name, scalar in (("num_steps", world.num_steps), ("grammar", {"step": tag})):
            batch.write(req_id, name, scalar)
            fields.write(req_id, name, scalar)
        peer = order.req_ids[(row + 1) % order.num_reqs]
        batch.write(req_id, "peer", batch.row_of(peer))
        fields.point(req_id, "peer", peer)
    ring = [req_id for req_id in reversed(batch.rows) if req_id is not None]
    rows = [batch.row_of(req_id) for req_id in ring]
    batch["ring"] = np.array([*rows, *[-1] * (batch.capacity - len(rows))])
    fields.write_ring([*ring, *[None] * (batch.capacity - len(ring))])
