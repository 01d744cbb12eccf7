"""Where the text of the scenario format leaves room: what the replayer does (see ``--help``)."""

READINGS = """\b
Where the scenario format leaves room, the replayer reads it so:

\b
Files
  Blank lines are skipped; a name that ends in .gz is read through gzip.
  "note" may stand in any line. Unknown keys, a key given twice in one
  object and wrong types are refused with file, line and key.
  Of a recorded trace, "expected" is what is right and "got" what the
  runner did; one that was cut off in its last line is replayed up to
  there, and says so. encode_rows may be null. Without draft_tokens, k
  is the most drafts that a decode of the file computes.

\b
Events
  add        modality is image if not given; embeds may be an array of
             0 and 1. An image or video without grid is refused by the
             three-axis families where the file expects a refusal, and
             otherwise has the grid [1, 1, places]. With rows other than
             the places it is refused (PlaceholderMismatch) where the
             file expects a refusal; otherwise the encoder delivers that
             many rows and the request fails in its step. A video of
             qwen2_5_vl without seconds_per_grid has 1 second.
             fields may name: tag, temperature, top_p, top_k, min_p,
             repetition_penalty, presence_penalty, frequency_penalty,
             seed, max_tokens, priority, greedy, adapter_id, logit_bias,
             hidden, token_ids, stop_token_ids, block_table,
             draft_token_ids, draft_probs, params, grammar.
  ask        of an unknown id: refused, as UnknownRequest or
             InvalidSchedule.
  step       what does not fit now is refused whole, as InvalidSchedule.
             Live requests without tokens have rows behind the others.
             The encoder runs before rows move: a request that fails has
             no row in that step. {} only closes holes.
             With "abandon": ["X"] beside it the step is given up before
             its forward, once these of its keys are encoded (or have
             failed): they stay, nothing is computed and no row moves.
  accept     for a decode, 0 to drafts; else the step is refused.
  confirm    may name several requests; refused whole or not at all.
             With "in_flight": {"A": 4} beside it, so many tokens of
             later steps stay counted: no roll back.
  finish, abort
             of a request that left already: nothing happens; the file
             may also expect UnknownRequest.
  resume     a string, or an object with computed.
  drop       of an absent key: nothing happens; of one in use: refused
             (EntryInUse).
  weights    unreferenced entries of other weights are gone at once; a
             request that refers to one keeps it until it is released.
  fail_encode
             once a key, whenever it is encoded next; all requests that
             wait for it fail.

\b
Expectations (about the event before them; notes do not count)
  order      requests with tokens, or these and the idle ones. After
             other events than a step: rows without holes.
  regions    requests by class, whatever the order; with "two" the rest may
             be counted under extend or prefill as a whole.
  moved      with or without idle requests.
  encoded    in the order of the schedule or of the rows; keys whose
             encode failed may be listed or left out.
  hits       keys newly found ready; keys in use before and keys that
             several requests share in this step may be listed too.
  features   a key that a chunk holds more than once is told apart by
             the index.
  positions  one list an axis; one list alone stands for every axis.
  next_position
             of the next token to compute; while the prompt is not
             computed, that of the first generated token passes too. One
             number stands for every axis.
  cache      keys are sets; weight epochs of one key count as one.
  error      the name of the class or of a base. In a step also a
             request that failed, if type and req_id are its own.
  failed     an array of requests, or an object with their reasons.
  Before the first event and after other events than a step nothing was
  encoded or moved, and no request has a chunk.
"""
