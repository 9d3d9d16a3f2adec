"""Threads that compile grammars and compute masks in parallel to the engine's steps.

Every sequence with a grammar is handed back once, with its constraint or an error, and is queued then, unless it was
cancelled. No step waits for a compilation. A step's masks are computed while its forward pass runs.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from app.engine.batch import TokenMasks
from app.engine.constraint import Constraint
from app.engine.errors import EngineFailure, PolyloraError
from app.engine.sequence import Sequence

if TYPE_CHECKING:  # llguidance is loaded by the first grammar
    from app.engine.structured_output.backend_guidance import Vocabulary


#: Receives a sequence that is ready, or one that cannot run and its error. Called on the compiler's thread.
OnCompiled = Callable[[Sequence, PolyloraError | None], None]


class GrammarCompiler:
    """Compiles grammars on one thread. The first one loads the vocabulary, which takes most of a second."""

    def __init__(self, load: Callable[[], Vocabulary], on_compiled: OnCompiled) -> None:
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._load = load
        self._vocabulary: Vocabulary | None = None
        self._on_compiled = on_compiled
        self._waiting: dict[str, Sequence] = {}  # by request id; used by atomic single operations only
        self._masks: BitmaskBuilder | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def submit(self, sequence: Sequence) -> None:
        """Compile a sequence's grammar and consume the tokens it resumes from."""
        self._waiting[sequence.request_id] = sequence
        self._thread.submit(self._compile, sequence)

    def cancel(self, request_id: str) -> bool:
        """Forget a sequence. True if it was still here; it is not handed back then."""
        return self._waiting.pop(request_id, None) is not None

    def masks(self, drawing: list[Sequence]) -> TokenMasks | None:
        """Start computing a step's masks (`BitmaskBuilder.start`)."""
        if self._masks is None:
            if all(sequence.constraint is None for sequence in drawing):
                return None
            self._masks = BitmaskBuilder()
        return self._masks.start(drawing)

    def wait_for_masks(self) -> None:
        if self._masks is not None:
            self._masks.wait()

    def close(self) -> None:
        self._waiting.clear()
        self._thread.shutdown(cancel_futures=True)
        if self._masks is not None:
            self._masks.close()

    def _compile(self, sequence: Sequence) -> None:
        error: PolyloraError | None = None
        try:
            sampling = sequence.request.sampling
            if self._vocabulary is None:
                self._vocabulary = self._load()
            vocabulary = self._vocabulary.with_tokens(sampling.grammar_tokens)
            matcher = vocabulary.matcher(
                sampling.grammar, sequence.tenant_id, sampling.grammar_prefix, sampling.eos_token_ids
            )
            if sequence.finish_reason() is None:
                matcher.consume(list(sequence.request.resume_token_ids))
            sequence.constraint = Constraint(matcher, num_seen=len(sequence.request.resume_token_ids))
        except PolyloraError as found:
            error = found
        except Exception as found:  # from loading the vocabulary, or from llguidance
            error = EngineFailure(f"the grammar could not be compiled: {type(found).__name__}: {found}")
        if self._waiting.pop(sequence.request_id, None) is sequence:
            self._on_compiled(sequence, error)


class BitmaskBuilder:
    """Computes masks on a thread of its own."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "masks")
        self._pending: Future[NDArray[np.uint32]] | None = None

    def start(self, drawing: list[Sequence]) -> TokenMasks | None:
        """Start computing the masks of a step: a row for each sequence and then one for each of its draft tokens.

        None if none of the sequences has a grammar.
        """
        work = [(s.constraint, s.output_ids, s.draft_ids) for s in drawing if s.constraint is not None]
        if not work:
            return None
        nums_rows = [1 + sequence.num_draft_tokens for sequence in drawing]
        has_mask = np.repeat([sequence.constraint is not None for sequence in drawing], nums_rows)  # [P]
        of_row = np.where(has_mask, np.cumsum(has_mask) - 1, -1).astype(np.int32)
        self._pending = self._thread.submit(self._fill, work)
        return TokenMasks(of_row, self._pending.result)

    def wait(self) -> None:
        """Wait until no mask is being computed: a forward pass that failed has not read its masks."""
        if self._pending is not None:
            self._pending.exception()
            self._pending = None

    def close(self) -> None:
        self._thread.shutdown()

    def _fill(self, work: list[tuple[Constraint, NDArray[np.int32], NDArray[np.int32]]]) -> NDArray[np.uint32]:
        num_words = max(constraint.num_words for constraint, _, _ in work)
        words = np.zeros((sum(1 + len(draft_ids) for _, _, draft_ids in work), num_words), np.uint32)
        end = 0
        for constraint, output_ids, draft_ids in work:
            first, end = end, end + 1 + len(draft_ids)
            constraint.fill(output_ids, draft_ids, words[first:end, : constraint.num_words])
        return words
