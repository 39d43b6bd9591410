"""What SGLang gets back of a round: tokens, lengths, logprobs, hidden states."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from sglang_parse.judging.decide import Decision
from sglang_parse.plugin.result import Emitted, build_result, emit, emit_ready
from sglang_parse.requests.draft import Draft
from sglang_parse.requests.round_records import Kept, RequestRound, Round
from sglang_parse.requests.state import RequestState
from tests.support.fake_engine import make_request

END = 99


def record(
    tokens, *, ahead=(), num_matched=0, asks=False, places=(), **more
) -> RequestRound:
    """ahead: tokens decided before the pass."""
    ready = (*ahead, *tokens)
    state = RequestState(None, frozenset({END}), None, None, ready=ready)
    req = make_request(output=[1], max_new_tokens=10_000)
    req.return_logprob = asks
    r = RequestRound(req, state, 0, 5, 1, output_len=1, **more)
    decision = Decision(tuple(tokens), 0, num_matched, ())
    r.kept = Kept(decision=decision, places=tuple(places))
    return r


def make_round(*requests: RequestRound, hidden=None, logprobs=None) -> Round:
    sampled = LogitsProcessorOutput(next_token_logits=None)
    if logprobs is not None:
        sampled.next_token_logprobs = torch.tensor(logprobs)
        sampled.next_token_top_logprobs_val = [[p] * 2 for p in logprobs]
    output = SimpleNamespace(hidden_states=hidden)
    return Round(None, list(requests), output=output, sampled=sampled)


def result_of(emitted, round, *, return_logprob=False, return_hidden_states=False):
    return build_result(
        emitted,
        round,
        seq_lens=torch.tensor([5] * len(emitted)),
        host_lens=torch.tensor([5] * len(emitted)),
        return_logprob=return_logprob,
        return_hidden_states=return_hidden_states,
    )


def test_hidden_states_beside_tokens_decided_ahead():
    """Red if a request whose tokens were decided before this pass makes another's
    hidden states be looked for behind the pass, which stops the scheduler."""
    first = record((7,), root_row=0)
    ahead = record((19,), ahead=tuple(range(19)), root_row=1)
    states = torch.tensor([[1.0], [2.0]])  # a plain round of two requests
    round = make_round(first, ahead, hidden=states)
    result = result_of([emit([r]) for r in round], round, return_hidden_states=True)
    assert result.logits_output.hidden_states[0].tolist() == [1.0]
    assert len(result.logits_output.hidden_states) == 2 * 20


def test_tokens_decided_ahead_are_emitted_once_and_first():
    """Red if they are lost, sent twice, or their drafts are counted twice."""
    r = record((5, 6), ahead=(3, 4), draft=Draft((5, 8, 9)))
    one = emit([r])
    assert (one.tokens, one.num_drafted) == ((3, 4, 5, 6), 2 + 3)
    assert r.state.ready == () and one.passes == (4,)
    r.state.ready = (3, 4)
    assert emit_ready(r.req, r.state) == Emitted((3, 4), 2, (2,))
    assert r.state.ready == () and emit_ready(r.req, r.state).tokens == ()


def test_passes_of_a_quantum_are_emitted_together():
    """Red if tokens of one are lost or come twice, if their drafts are not counted, or
    if SGLang takes all of them for what one pass gave."""
    first = record((5, 6), ahead=(3, 4), draft=Draft((5, 8, 9)))
    second = record((7,), draft=Draft((8,)))
    last = record((8, 9, 9))  # decode steps
    second.state = last.state = first.state
    first.state.ready = (3, 4, 5, 6, 7, 8, 9, 9)
    one = emit([first, second, last])
    assert one.tokens == (3, 4, 5, 6, 7, 8, 9, 9) and one.r is last
    assert one.num_drafted == 2 + 3 + 1
    assert one.passes == (4, 1, 1, 1, 1)
    assert first.state.ready == ()
    result = result_of([one, Emitted((8,), 0, (1,)), Emitted()], None)
    assert result.num_more_passes == 4


def test_nothing_is_emitted_behind_the_end():
    """Red if SGLang gets tokens behind the end of an answer, or passes that gave none
    of those before it."""
    first = record((5, 6), ahead=(3, 4), draft=Draft((5, 8, 9)))
    last = record((7, END, 8))  # decode steps
    last.state = first.state
    first.state.ready = (3, 4, 5, 6, 7, END, 8)
    one = emit([first, last])
    assert (one.tokens, one.passes) == ((3, 4, 5, 6, 7, END), (4, 1, 1))


def test_tokens_are_padded_to_one_stride():
    """Red if a request gets tokens of its neighbour or of the padding."""
    emitted = [Emitted((5, 6, 7), 4), Emitted((8,), 0), Emitted()]
    result = result_of(emitted, None)
    assert result.next_token_ids.tolist() == [5, 6, 7, 8, 0, 0, 0, 0, 0]
    assert result.speculative_output_stride == 3
    assert result.accept_lens.tolist() == [3, 1, 0]
    assert result.cap_lens.tolist() == [4, 0, 0]
    assert result.lens.tolist() == result.host_lens.tolist() == [8, 6, 5]
    # A batch of which nobody gets a token has a stride that SGLang can divide by.
    result = result_of([Emitted()], None, return_logprob=True)
    assert result.speculative_output_stride == 1
    assert result.accept_lens.tolist() == [0]


@pytest.mark.parametrize("asked", ["", "logprobs", "hidden"])
def test_what_the_host_has_is_not_waited_for(asked):
    """Red if SGLang waits for a copy from the device, or reads what requests asked
    for besides before it is there."""
    recorded = []
    result = result_of([Emitted((5,))], None)
    result.copy_done = SimpleNamespace(record=lambda: recorded.append(1))
    result.copy_to_cpu(asked == "logprobs", asked == "hidden")
    assert (result.copy_done is None) == (not asked)
    assert recorded == [1] * bool(asked)
    assert result.next_token_ids.is_cpu and result.accept_lens.is_cpu


def test_each_token_has_its_own_logprob():
    """Red if a request that was never judged gets the logprobs of another row, or one
    that waits or was judged moves those of its neighbours."""
    judged = record((1, 2, 3), places=[1])
    exact = record((4, 5), places=[0, 2, 3], num_matched=1, asks=True)
    round = make_round(judged, exact, logprobs=[10.0, 11.0, 12.0, 13.0])
    emitted = [emit([judged]), Emitted(), emit([exact])]
    output = result_of(emitted, round, return_logprob=True).logits_output
    assert output.next_token_logprobs.shape == (3, 2)
    assert output.next_token_logprobs[2, :2].tolist() == [10.0, 12.0]
    # SGLang finds the row of a token by the width of the logprobs.
    assert len(output.next_token_top_logprobs_val) == 6
    assert output.next_token_top_logprobs_val[4:6] == [[10.0] * 2, [12.0] * 2]


def test_a_long_text_does_not_pad_the_logprobs_of_others():
    """Red if rows of logprobs grow with a text whose request asked for none."""
    long = record((1,), ahead=(2,) * 6000, places=[1])
    asking = record((4,), places=[0], asks=True)
    round = make_round(long, asking, logprobs=[10.0, 11.0])
    output = result_of([emit([r]) for r in round], round, return_logprob=True)
    assert output.speculative_output_stride == 6001
    assert output.logits_output.next_token_logprobs.tolist() == [[11.0], [10.0]]
    assert len(output.logits_output.next_token_top_logprobs_val) == 2


def test_hidden_states_go_by_the_rows_of_the_pass():
    """Red if a request beside one that waits gets another's hidden states."""
    one = record((4, 5), root_row=2)
    round = make_round(one, hidden=torch.arange(6.0)[:, None])
    emitted = [Emitted(), emit([one])]
    output = result_of(emitted, round, return_hidden_states=True).logits_output
    assert output.hidden_states[2:].flatten().tolist() == [2.0, 3.0]
