"""The table of mutations: one place of the library each, with what goes wrong then."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Mutation:
    """One change of one place.

    Attributes:
        file: below the package.
        old: text that occurs there exactly once.
        new: text in its place.
        meaning: what is broken.

    """

    file: str
    old: str
    new: str
    meaning: str

    def apply(self, package: Path) -> None:
        """Change the file in a copy of the package.

        Raises:
            ValueError: the old text does not occur exactly once.

        """
        path = package / self.file
        source = path.read_text(encoding="utf-8")
        if source.count(self.old) != 1:
            raise ValueError(f"{self.file}: {source.count(self.old)} times {self.old!r}, not once")
        path.write_text(source.replace(self.old, self.new), encoding="utf-8")


M = Mutation
MUTATIONS = (
    # -- order -------------------------------------------------------------------------------
    M("order/moves.py", "new_row_of[sources] = destinations\n    num_newcomers",
      "new_row_of[sources] = sources\n    num_newcomers",
      "row numbers held in fields are not remapped"),
    M("order/moves.py", "sources = destinations[region[destinations].argsort(kind=\"stable\")]",
      "sources = destinations[::-1]", "misplaced rows are sent to the wrong region"),
    M("order/moves.py", "num + newcomer_rank)", "newcomer_rank - num)",
      "stable order puts newcomers first"),
    M("order/moves.py", "\"two\": np.array([0, 1, 1, 3, HOLE]",
      "\"two\": np.array([0, 0, 1, 3, HOLE]", "policy two counts extends as decodes"),
    M("order/moves.py", "len(sources) - int(num_newcomers)", "len(sources)",
      "newcomers are counted as moved"),
    M("order/moves.py", "for row in moves.vacated.tolist():", "for row in ():",
      "vacated rows of lists keep the object of who left"),
    M("order/batch_order.py", "self.policy == \"arrival\" and self.regions.decode < self.num_reqs",
      "self.num_reqs < 0", "without regions the first rows are taken for decodes"),
    M("order/batch_order.py", "self.computed - self.query_start[:-1]",
      "self.computed + self.query_start[:-1]", "token indices count in the wrong direction"),
    M("order/restore.py", "return [leaf[row] for row in range(num_reqs)]",
      "return [leaf[num_reqs - 1 - row] for row in range(num_reqs)]",
      "outputs are restored in reverse order"),
    # -- fields and movers -------------------------------------------------------------------
    M("fields/storage.py", "self._set_length(name, index[self.registry[name].residency], 0)",
      "pass", "a newcomer has the ragged length of who had the slot before"),
    M("fields/storage.py",
      "self._backend.clear(group.array, group.axis, i, i + 1, group.default)", "pass",
      "a newcomer without a value has the value of who had the slot before"),
    M("fields/storage.py", "for name in self._row_objects:", "for name in self._row_objects[1:]:",
      "one host field is skipped in a move"),
    M("fields/storage.py", "self.objects[name][slot] = None", "pass",
      "a free slot keeps the object of who left"),
    M("fields/derived.py", "if used > len(fresh):", "if used > len(fresh) + 1:",
      "a derived field keeps one old value behind a shorter step"),
    M("fields/derived.py", "whole[num + 1 :] = whole[num]", "whole[num + 1 :] = 0",
      "running sums do not go on past the last row"),
    M("fields/storage.py", "self.lengths[name][index] = start + len(values)",
      "self.lengths[name][index] = start", "an append does not extend the valid prefix"),
    M("backends/mover.py", "for group in self._rows.groups:\n                self._backend.move(",
      "for group in self._rows.groups[1:]:\n                self._backend.move(",
      "one group of fields is skipped in a move"),
    M("backends/mover.py", "group.axis, moves.destinations, moves.sources)",
      "group.axis, moves.sources, moves.destinations)", "rows move the other way"),
    M("backends/mover.py", "widths = np.maximum(moved, lengths[moves.destinations])",
      "widths = moved", "a shorter ragged row leaves the tail of the longer one"),
    M("backends/mover.py", "lengths[moves.destinations] = moved", "pass",
      "ragged lengths do not move with their rows"),
    M("backends/mover.py", "self._backend.remap(array, moves.new_row_of)", "pass",
      "fields that hold row numbers are not remapped"),
    M("backends/mover.py",
      "self._backend.clear(group.array, group.axis, start, stop, group.default)", "pass",
      "rows without a request keep the values of who left"),
    M("backends/host.py", "array[destinations] = array[sources]",
      "array[destinations[:-1]] = array[sources[:-1]]", "the last move of an array is left out"),
    # -- batch -------------------------------------------------------------------------------
    M("batch/rows.py", "self.is_new[slot] = True", "self.is_new[slot] = False",
      "newcomers count as members of the order before"),
    M("batch/rows.py", "self.admission[slot] = -1\n        self._asked = None",
      "self.admission[slot] = -1", "slots of the last schedule are remembered after a departure"),
    M("batch/rows.py", "self.slot_of_row[moves.destinations] = slots", "pass",
      "rows move, their slots stay"),
    M("batch/progress.py", "np.minimum(computed + (1 + num_drafts), max_model_len)",
      "np.minimum(computed + (1 + num_drafts), max_model_len + 1)",
      "a request may grow one token past max_model_len"),
    M("batch/requests.py", "if field.is_per_request and field.on_preempt == \"keep\"",
      "if field.is_per_request and field.on_preempt == \"keep\" and field.name != \"tag\"",
      "one field is not kept through preemption"),
    M("batch/requests.py",
      "slot = self._occupy(req_id, record.num_tokens, computed, values)",
      "slot = self._occupy(req_id, record.num_tokens, 0, values)",
      "a resume behind a cached prefix starts from zero"),
    M("batch/input_batch.py", "alive = self._table.admission[order.slots] == self._order_admission",
      "alive = self._table.admission[order.slots] >= 0",
      "a step in flight is counted for the next occupant of a slot"),
    M("batch/input_batch.py", "self.progress.confirmed[:] = self.progress.computed", "pass",
      "automatic confirmation confirms nothing"),
    M("batch/planner.py", "too_long = computed + order.scheduled > self._max_model_len",
      "too_long = computed > self._max_model_len", "a repeated decode step outgrows max_model_len"),
    M("batch/planner.py", "too_long | (computed < order.prompt_lens)", "too_long",
      "a repeated step takes requests rolled back into their prompt for decodes"),
    M("batch/proposer.py", "{name: values[name] for name in self.copied & values.keys()}", "{}",
      "the draft model's copies of fields are not written"),
    M("batch/proposer.py", "moves.\"\"\"\n        self._storage.move(moves)", "moves.\"\"\"",
      "the draft model's fields do not follow"),
    M("batch/followers.py", "for follower in self._all:\n            follower.follow(moves)",
      "for follower in self._of_requests:\n            follower.follow(moves)",
      "lists outside the batch do not follow"),
    # -- progress ----------------------------------------------------------------------------
    M("batch/progress.py", "in_prompt = self.computed < self.prompt_len\n",
      "in_prompt = self.computed <= self.prompt_len\n", "the first decode counts as prefill"),
    M("batch/progress.py", "in_prompt & (self.computed == 0)",
      "in_prompt & (self.computed <= 1)",
      "a prompt of which one token is computed counts as untouched"),
    M("batch/progress.py", "return prompt_len if computed < prompt_len else computed + 1",
      "return prompt_len if computed <= prompt_len else computed + 1",
      "a preempted request loses its first output"),
    M("batch/progress.py", "np.where(computed < prompt_len, prompt_len, decoded)",
      "np.where(computed < prompt_len, prompt_len, decoded + 1)",
      "a decode may have one draft too many"),
    M("batch/progress.py", "grown[row] = 1 + count", "grown[row] = count",
      "the sampled token is not counted beside accepted drafts"),
    M("batch/progress.py", "= computed if rolled_back else computed + in_flight",
      "= max(computed, self.computed[slot])", "a roll back changes nothing"),
    # -- features: chunks --------------------------------------------------------------------
    M("features/chunks.py", "min(max(stop - offset, 0), length)",
      "min(max(stop - offset + 1, 0), length)", "a chunk takes one feature row too many"),
    M("features/chunks.py", "max(start, self.item.offset), min(stop, self.item.stop), dtype",
      "max(start, self.item.offset) + 1, min(stop, self.item.stop) + 1, dtype",
      "features go to the token after theirs"),
    M("features/chunks.py", "np.searchsorted(self.places, (start, stop))",
      "np.searchsorted(self.places, (start, stop), side=\"right\")",
      "masked items count places from one token later"),
    M("features/chunks.py", "touched.append((placed.first_place_from(start), number))",
      "touched.append((placed.item.offset, number))", "nested items are taken by offset"),
    M("features/chunks.py", "if start <= placed.item.offset < stop < placed.stop:",
      "if start < placed.item.offset < stop < placed.stop:",
      "a chunk may cut the item that it starts with"),
    # -- features: plan ----------------------------------------------------------------------
    M("features/plan.py", "ahead = self._request.items[number].stop > self._start",
      "ahead = self._request.items[number].stop >= self._start",
      "items that were passed are referred to again"),
    M("features/plan.py", "self._uncut(place - self._walk.limits.lookahead)",
      "self._uncut(place)", "a shortened chunk forgets the look-ahead"),
    M("features/plan.py", "self._stop + self._walk.limits.lookahead)", "self._stop)",
      "the look-ahead does not encode"),
    M("features/plan.py", "self.ledger.pin(key)\n", "pass\n",
      "an entry needed in the step may be evicted in it"),
    M("features/plan.py", "for request in (self._request, *later):",
      "for request in (*later, self._request):", "others give up space before the request itself"),
    M("features/plan.py", "self.encoded_rows = trial.encoded_rows", "pass",
      "the encode budget counts for each request anew"),
    M("features/plan.py",
      "return limit is not None and self._encode_left() < rows <= limit - own_rows",
      "return False", "an item is not waited for that a later step could encode"),
    # -- features: gather and store ----------------------------------------------------------
    M("features/gather.py", "start = int(order.computed[row]) + shift",
      "start = int(order.computed[row])", "a drafter reads the features of the target"),
    M("features/gather.py", "if start >= request.media_stop:",
      "if start >= request.media_stop - 1:", "the last feature of a prompt is lost"),
    M("features/gather.py", "int(order.query_start[row]) - start",
      "int(order.query_start[0]) - start", "features go to the tokens of the first row"),
    M("features/store.py", "reach = computed - self._limits.lookahead", "reach = computed",
      "references go before the look-ahead has passed"),
    M("features/store.py", "if request.items[n].stop <= reach",
      "if request.items[n].stop - 1 <= reach", "references go one token early"),
    M("features/store.py", "self._release(request, list(request.held))",
      "self._release(request, list(request.held)[1:])",
      "a request that leaves keeps one reference"),
    M("features/store.py", "start + num_tokens + self.lookahead)", "start + num_tokens)",
      "what the look-ahead wants is not spared from eviction"),
    # -- cache -------------------------------------------------------------------------------
    M("cache/encoder_cache.py", "if entry.references or entry.features is None:",
      "if entry.features is None:", "an entry can be evicted with references left"),
    M("cache/encoder_cache.py", "entry.references.discard(reference)", "entry.references.clear()",
      "one release drops the references of all"),
    M("cache/encoder_cache.py", "references.add(reference)\n        self._idle.pop(key, None)",
      "references.add(reference)", "a hit does not pin"),
    M("cache/encoder_cache.py", "self._used_rows -= self._entries.pop(key).rows",
      "self._entries.pop(key)", "freed rows stay counted"),
    M("cache/encoder_cache.py", "self._freed[key] = None", "pass",
      "a mirror is not told what was freed"),
    M("cache/encoder_cache.py", "for key in reversed(wanted):", "for key in wanted:",
      "of what the step wants the first needed is evicted first"),
    M("cache/ledger.py", "victim = next(iter(self._idle))",
      "victim = next(reversed(self._idle))", "the most recently used entry is evicted"),
    M("cache/encoder_cache.py", "if key.epoch == self.epoch and self.retain:",
      "if key.epoch <= self.epoch:",
      "features of old weights stay"),
    M("cache/ledger.py", "self._cache.references(key) <= self.shed.keys()",
      "self.shed", "space is taken from entries that others refer to"),
    # -- positions ---------------------------------------------------------------------------
    M("positions/families.py", "delta = next_position - stop", "delta = next_position - stop + 1",
      "text after an item is one position late"),
    M("positions/families.py", "base = bases.setdefault(grid_start, next_position)",
      "base = next_position", "a grid that a mask interrupts starts anew"),
    M("positions/families.py", "t_scale = seconds * tokens_per_second", "t_scale = seconds",
      "timed videos ignore the tokens per second"),
    M("positions/families.py", "if cell == 0:\n                grid_start = start",
      "if grid_start < 0:\n                grid_start = start",
      "frames of a video share a grid"),
    M("positions/runs.py", "if first else 0\n", "if first > 1 else 0\n",
      "a chunk after the first item has no delta"),
    M("positions/store.py", "self._delta_of_slot[slot] = runs.delta",
      "self._delta_of_slot[slot] = self._delta_of_slot[slot - 1]",
      "a slot takes over the delta of its neighbour"),
    # -- step --------------------------------------------------------------------------------
    M("step.py", "for req_id in self.features.holding():",
      "for req_id in self.features.holding()[1:]:", "one request is not released after a step"),
    M("step.py", "self.features.confirm(req_id, computed)\n        return", "return",
      "manual confirmation releases nothing"),
    M("step.py", "self.features.release_all(req_id)\n", "\n",
      "a preempted request keeps its references"),
    M("step.py", "{r: min(n, self.batch.remaining_of(r)) for r, n in wanted.items()}",
      "dict(wanted)", "the question promises more tokens than remain"),
    M("step.py", "self.batch.advance(order, accepted)", "self.batch.advance(order)",
      "rejected drafts count as computed"),
)  # fmt: skip
