"""A decode step: a round, and texts that wait beside it."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_parse.judging.decide import Decision
from sglang_parse.plugin import batches as batches_module
from sglang_parse.plugin.batches import Batches
from sglang_parse.plugin.rounds import Queue
from sglang_parse.reporting.telemetry import Telemetry
from sglang_parse.requests.round_records import Kept
from sglang_parse.requests.state import RequestState
from tests.support.fake_batch import plain_sampling

WAITS, FAILS, DRAFTS = "waits", "fails", "drafts"


class Req:
    grammar = to_finish = None
    rid, vocab_size = "r", 100
    sampling_params = SamplingParams(max_new_tokens=100)

    def __init__(self, kind: str = "") -> None:
        self.kind = kind
        self.output_ids = [1]
        self.spec_num_correct_drafts = 0
        self.spec_correct_drafts_histogram = [1]
        self.spec_verify_ct = 0
        self.verification = "text" if kind == WAITS else None


class Engine:
    """Decides token 7 for every request of a pass but those that fail. Those that draft
    take no part in one."""

    #: Passes of a quantum, where nobody asks for more than tokens.
    num_passes = 1

    def run_quantum(self, open_round):
        rounds = []
        while len(rounds) < self.num_passes:
            round = open_round()
            rounds.append(self.run(round))
            if round.has_mail():
                break
        return [one for one in rounds if one.requests]

    def run(self, round):
        done = round.of([r for r in round if r.req.kind != DRAFTS], round.batch)
        for row, r in enumerate(done):
            r.root_row = row
            r.kept = Kept(decision=Decision((7,), 0, 0, ()))
            if r.req.kind == FAILS:
                r.fail(KeyError("x"))
            else:
                r.state.ready += r.decision.accept_tokens
        done.num_rows = 5
        done.seconds = {"draft": 0.1, "layout": 0.2, "verify": 0.3, "decide": 0.4}
        return done


@pytest.fixture
def decode(monkeypatch):
    """Kinds of requests -> what was told, the requests and SGLang's result."""
    monkeypatch.setattr(batches_module, "round_timing", lambda round: None)
    view = "sglang_parse.sgl.views.expand_rows"
    monkeypatch.setattr(view, lambda info, rows, device: info)

    def run(*kinds: str, num_passes=1, has_mail=False, ready=()):
        reqs = [Req(kind) for kind in kinds]
        states = {
            req: RequestState(
                None,
                frozenset(),
                None,
                None,
                verification=req.verification,
                ready=ready,
            )
            for req in reqs
        }
        engine = Engine()
        engine.num_passes = num_passes
        told = SimpleNamespace(
            telemetry=Telemetry(), texts=[], states=list(states.values())
        )
        batches = Batches(
            engine,
            prefills=None,
            client_pass=SimpleNamespace(
                go_on=lambda batch, states: told.texts.append(states)
            ),
            requests=SimpleNamespace(of=states.__getitem__),
            telemetry=told.telemetry,
        )
        num = len(reqs)
        batch = SimpleNamespace(
            reqs=reqs, tree_cache=None,
            req_pool_indices=torch.arange(num),
            req_pool_indices_cpu=torch.arange(num) + 10,
            seq_lens=torch.full((num,), 5), seq_lens_cpu=torch.full((num,), 5),
            sampling_info=plain_sampling(9),
            device="cpu",
            return_logprob=False, return_hidden_states=False,
            top_logprobs_nums=None, token_ids_logprobs=None,
            parse_queue=Queue(has_mail=lambda: has_mail),
        )  # fmt: skip
        return told, reqs, batches.decode(batch)

    return run


def seconds_of(told):
    return told.telemetry.as_dict()["stage_seconds"]


def test_texts_wait_beside_a_round(decode):
    """Red if a request that waits for verdicts takes part in a round, or the others get
    its place in the batch."""
    told, reqs, result = decode("", WAITS, "")
    assert result.accept_lens.tolist() == [1, 0, 1]
    assert result.next_token_ids.tolist() == [7, 0, 7]
    assert told.texts == [told.states]
    # SGLang counts the number of tokens less one as correct drafts.
    assert [r.spec_num_correct_drafts for r in reqs] == [0, 1, 0]


def test_texts_that_wait_alone_need_no_round(decode):
    """Red if a batch without anybody to decode for stops the scheduler, or costs a
    pass."""
    told, _, result = decode(WAITS, WAITS)
    assert result.accept_lens.tolist() == [0, 0]
    assert told.texts == [told.states] and not seconds_of(told)


def test_a_request_that_failed_ends_alone(decode):
    """Red if our own error in one request costs another a token, or its sender gets no
    answer."""
    _, (bad, good), result = decode(FAILS, "")
    assert bad.to_finish.status_code == 500 and good.to_finish is None
    assert "KeyError" in bad.to_finish.message
    assert result.accept_lens.tolist() == [0, 1]


def test_time_and_rows_of_a_round_are_told_by_kind(decode):
    """Red if laying a pass out is lost from the time of verifying, or the rows of the
    draft are counted among those of the verdicts."""
    told, *_ = decode("", "")
    assert seconds_of(told) == {"draft": 0.1, "verify": 0.5, "decide": 0.4}
    assert told.telemetry.as_dict()["pass_rows"] == {"draft": 2, "verdict": 3}


def test_the_passes_of_a_quantum_give_one_result(decode):
    """Red if SGLang does not get the tokens of all of them, or counts them as one pass;
    if their time is told once; or if the next round does not begin where they end."""
    told, reqs, result = decode("", "", num_passes=3)
    assert result.accept_lens.tolist() == [3, 3]
    assert result.next_token_ids.tolist() == [7] * 6
    assert result.lens.tolist() == [8, 8]
    assert seconds_of(told)["draft"] == 0.3
    assert [r.spec_verify_ct for r in reqs] == [2, 2] and result.num_more_passes == 4


def test_who_drafts_is_given_nothing(decode):
    """Red if a request without a pass gets a token of another one, or SGLang counts a
    pass for it; or if a quantum in which all drafted stops the scheduler."""
    told, reqs, result = decode(DRAFTS, "", num_passes=3)
    assert result.accept_lens.tolist() == [0, 3]
    assert result.next_token_ids.tolist() == [0] * 3 + [7] * 3
    assert result.lens.tolist() == [5, 8]
    assert [r.spec_num_correct_drafts for r in reqs] == [1, -2]
    assert reqs[0].spec_verify_ct == -1 and reqs[1].spec_verify_ct == 2
    told, _, result = decode(DRAFTS, DRAFTS)
    assert result.accept_lens.tolist() == [0, 0] and not seconds_of(told)


def test_what_was_decided_ahead_is_given_without_a_pass(decode):
    """Red if a client's text that was kept is held back until a draft is complete, or
    is sent twice."""
    told, reqs, result = decode(DRAFTS, ready=(4, 5))
    assert result.next_token_ids.tolist() == [4, 5]
    assert result.accept_lens.tolist() == [2] and result.lens.tolist() == [7]
    assert told.states[0].ready == () and not seconds_of(told)
    told, _, result = decode("", ready=(4, 5))
    assert result.next_token_ids.tolist() == [4, 5, 7]
    assert told.states[0].ready == ()


@pytest.mark.parametrize(
    ("kinds", "more"),
    [
        (("",), {"has_mail": True}),
        (("", WAITS), {}),
    ],
)
def test_the_scheduler_is_asked_behind_one_round(decode, kinds, more):
    """Red if a request that came, or a text that waits, waits for several rounds; or if
    what is known of the tokens of all rounds but the last is lost."""
    told, _, result = decode(*kinds, num_passes=3, **more)
    assert seconds_of(told)["draft"] == 0.1 and result.accept_lens.tolist()[0] == 1
