"""What a step's result brings its requests: tokens and what comes with them, computed positions, full blocks, ends."""

from __future__ import annotations

from collections.abc import Iterator

from tokserve.engine.counters import Counters
from tokserve.engine.kv_cache.prefix_cache import PrefixCache
from tokserve.engine.output.columns import PackedMasks, PackedRows
from tokserve.engine.plan_builder import InFlightStep
from tokserve.engine.request import Request, State
from tokserve.protocol.plan import NOT_FINITE, OK, StepResult


def take_rows(
    step: InFlightStep, result: StepResult, cache: PrefixCache, counters: Counters, now: float
) -> Iterator[tuple[Request, int]]:
    """Each request of the step, once it has what the result brings it, and the number of tokens that were sampled for
    it; a request that had ended before gets nothing."""
    token_ids, prompt_logprobs = result.token_ids.tolist(), result.prompt_logprobs
    logprobs = None if result.logprobs is None else PackedRows(result.logprobs)
    masks = None if result.sampling_masks is None else PackedMasks(result.sampling_masks)
    last = 0  # of the rows' tokens so far
    block_size, version, num_output = cache.block_size, step.weight_version, 0
    columns = zip(step.rows, result.counts.tolist(), result.status.tolist(), strict=True)
    for index, (row, count, status) in enumerate(columns):
        request = row.request
        request.steps_in_flight -= 1
        first, last = last, last + count
        if request.state is not State.ENDED:  # else it is surplus: its end was found after this plan was made
            if prompt_logprobs and index in prompt_logprobs:
                request.output.add_prompt_rows(request.num_settled, prompt_logprobs[index])
            request.num_in_flight -= row.num_logits
            rejected = row.num_logits - count  # drafts, or the position whose token was withheld
            request.on_computed(version, row.num_tokens, rejected)
            if index in result.routed_experts:
                request.output.add_routed_experts(request.num_settled, result.routed_experts[index])
            if rejected:
                request.roll_back(rejected)
            if status != OK:
                counters.nan_requests += status == NOT_FINITE
                request.on_status(status, now)
            elif count:
                num_output += request.append(token_ids[first:last], logprobs, first, now, masks)
            elif request.prompt_only and request.num_settled == request.prompt_len:
                request.on_prompt_computed(result.pooled.get(index), now)
            if request.num_settled >= (request.table.num_full + 1) * block_size:
                settled = min(request.num_settled, len(request.tokens))  # a stop may have dropped accepted drafts
                cache.cache_full_blocks(request.table, request.tokens, settled)
        yield request, count
    counters.output_tokens += num_output
