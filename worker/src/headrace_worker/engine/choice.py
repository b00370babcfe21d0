"""One choice being generated: how its next token is drawn, what text it adds, when it ends."""

from __future__ import annotations

from collections import Counter

from headrace_worker.engine.detokenize import Detokenizer
from headrace_worker.engine.output import ChoiceOutput
from headrace_worker.engine.request import Finish, Sequence
from headrace_worker.engine.token_table import TokenTable
from headrace_worker.sampling import Sampled, SampleSpec


class Choice:
    """Generation state of one sequence.

    Args:
        seq: its tokens; `accept` appends to them.
        table: bytes of tokens.
        prompt_counts: occurrences in the prompt, for the repetition penalty.
        max_sequence_tokens: prompt and output together end here.
    """

    def __init__(
        self,
        seq: Sequence,
        table: TokenTable,
        prompt_counts: Counter[int],
        max_sequence_tokens: int,
    ) -> None:
        self.seq = seq
        self._stopping = seq.request.stopping
        self._detokenizer = Detokenizer(table, self._stopping.stop, self._stopping.min_tokens)
        constraint = seq.request.constraint
        self._matcher = None if constraint is None else constraint.begin()
        self._prompt_counts = prompt_counts
        self._output_counts: Counter[int] = Counter()
        self._max_sequence_tokens = max_sequence_tokens
        # Stop string that the last token completed.
        self._matched = ""

    def replay(self) -> Finish | None:
        """Take in what was made elsewhere; return why the choice had ended there, if it had."""
        output = self.seq.token_ids[self.seq.num_prompt :]
        if self._counts_output:
            self._output_counts.update(output)
        finish = None
        for num_output, token_id in enumerate(output, 1):
            finish, _ = self._advance(token_id, num_output)
            if finish is not None:
                break
        return finish

    def ended_elsewhere(self, finish: Finish) -> ChoiceOutput:
        """Repeat the end of a choice that `replay` found ended. Its text was sent with it."""
        return ChoiceOutput(self.seq.choice_idx, finish=finish, stop_matched=self._matched)

    def spec(self) -> SampleSpec:
        """Say how the next token is to be drawn.

        Raises:
            InvalidRequest: the constraint has become too costly.
        """
        request, position = self.seq.request, self.seq.num_output
        params = request.sampling
        is_early = position < self._stopping.min_tokens
        return SampleSpec(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            frequency_penalty=params.frequency_penalty,
            presence_penalty=params.presence_penalty,
            repetition_penalty=params.repetition_penalty,
            output_counts=self._output_counts,
            prompt_counts=self._prompt_counts,
            logit_bias=params.logit_bias,
            allowed_token_ids=params.allowed_token_ids,
            allowed_mask=None if self._matcher is None else self._matcher.mask(),
            forbidden_token_ids=tuple(self._stopping.end_token_ids) if is_early else (),
            seed=request.seed,
            choice_idx=self.seq.choice_idx,
            position=position,
            num_top_logprobs=request.num_top_logprobs,
        )

    def accept(self, sampled: Sampled) -> ChoiceOutput:
        """Append a drawn token and return what may go out because of it.

        Raises:
            InvalidRequest: the constraint cannot go on with it; it is not appended.
        """
        finish, text = self._advance(sampled.token_id, self.seq.num_output + 1)
        self.seq.token_ids.append(sampled.token_id)
        if self._counts_output:
            self._output_counts[sampled.token_id] += 1
        return ChoiceOutput(self.seq.choice_idx, [sampled], text, finish, self._matched)

    def _advance(self, token_id: int, num_output: int) -> tuple[Finish | None, str]:
        stopping = self._stopping
        if token_id in stopping.end_token_ids and num_output > stopping.min_tokens:
            return Finish.STOP, self._detokenizer.finish()
        if self._matcher is not None:
            self._matcher.accept(token_id)
        piece = self._detokenizer.push(token_id)
        if piece.stop_matched is not None:
            self._matched = piece.stop_matched
            return Finish.STOP, piece.text
        if self._matcher is not None and self._matcher.is_complete:
            # Nothing but an end token could follow, whatever min_tokens and ignore_eos say.
            return Finish.STOP, piece.text + self._detokenizer.finish()
        num_tokens = self.seq.num_prompt + num_output
        if num_output >= stopping.max_tokens or num_tokens >= self._max_sequence_tokens:
            return Finish.LENGTH, piece.text + self._detokenizer.finish()
        return None, piece.text

    @property
    def _counts_output(self) -> bool:
        return self.seq.request.sampling.uses_counts
