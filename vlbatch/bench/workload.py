"""What row methods are timed on: FastDeploy's field set, half of the rows misplaced."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vlbatch.fields import Field, Kind
from vlbatch.integrations.fastdeploy.fields import FieldSizes, declare_fields

PROMPT_LEN = 20
"""Valid tokens of the wide rows, for methods that move active prefixes."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A batch whose requests change class from round to round.

    Attributes:
        sizes: extents of the fields.
        decode: bool ``[2, requests]``: which requests decode, in even and odd rounds.
    """

    sizes: FieldSizes
    decode: npt.NDArray[np.bool_]

    @classmethod
    def make(cls, num_reqs: int, *, seed: int = 0) -> Workload:
        """Half of the requests decode, another random half each round."""
        rng = np.random.default_rng(seed)
        decode = np.zeros((2, num_reqs), dtype=np.bool_)
        for half in decode:
            half[rng.permutation(num_reqs)[: num_reqs // 2]] = True
        sizes = FieldSizes(
            max_num_seqs=num_reqs,
            max_model_len=1024,
            max_chunk_tokens=64,
            vocab_size=1024,
            num_draft_tokens=3,
            multimodal=True,
        )
        return cls(sizes, decode)

    @property
    def num_reqs(self) -> int:
        """Requests of the batch."""
        return self.decode.shape[1]

    def classes(self, number: int) -> npt.NDArray[np.bool_]:
        """Whether each request decodes in a round."""
        flags: npt.NDArray[np.bool_] = self.decode[number % 2]
        return flags

    def row_fields(self) -> list[Field]:
        """Array fields with one value a request."""
        return [
            f for f in declare_fields(self.sizes)
            if f.is_per_request and f.kind is not Kind.HOST
        ]  # fmt: skip

    def is_wide(self, field: Field) -> bool:
        """Whether a field is one of those that this library keeps in slots."""
        return field.residency == "slots"

    def array(self, field: Field) -> npt.NDArray[np.generic]:
        """A numpy array ``[requests, ...]`` of a field's shape."""
        shape = field.row_shape(self.sizes.num_draft_tokens)
        return np.zeros((self.num_reqs, *shape), dtype=field.stored_dtype)
