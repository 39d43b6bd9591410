"""What a round is told of the scheduler, and which texts are admitted together."""

from types import SimpleNamespace

import pytest
import torch
import zmq
from sglang.srt.managers.schedule_policy import AddReqResult

from sglang_parse.plugin import scheduler_hooks
from sglang_parse.plugin.rounds import QUEUE, Queue, open_round, queue_of
from tests.support.fake_batch import plain_sampling

SCHEDULER = SimpleNamespace(
    waiting_queue=[1] * 9,
    get_num_allocatable_reqs=lambda bs: 7 - bs,
    recv_from_tokenizer=None,
    metrics_reporter=None,
)


@pytest.mark.parametrize(("num_running", "num_waiting"), [(4, 3), (7, 0), (8, 0)])
def test_only_those_count_for_whom_there_is_a_row(num_running, num_waiting):
    """Red if rounds are shortened for requests that only the end of others lets in."""
    batch = SimpleNamespace(reqs=[1] * num_running)
    scheduler_hooks.note_waiting(SCHEDULER, batch)
    assert queue_of(batch).num_waiting == num_waiting


def test_mail_is_seen_and_left_for_the_scheduler():
    """Red if a request that comes does not end a row of rounds, if it is taken from the
    scheduler, or if a rank without a socket looks for mail."""
    context = zmq.Context()
    there, here = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    there.connect(f"tcp://127.0.0.1:{here.bind_to_random_port('tcp://127.0.0.1')}")
    batch = SimpleNamespace(reqs=[1])
    scheduler = SimpleNamespace(**vars(SCHEDULER) | {"recv_from_tokenizer": here})
    scheduler_hooks.note_waiting(scheduler, batch)
    assert not queue_of(batch).has_mail()
    there.send(b"request")
    assert here.poll(10_000)
    assert queue_of(batch).has_mail() and queue_of(batch).has_mail()
    assert here.recv(zmq.NOBLOCK) == b"request"
    assert not queue_of(batch).has_mail()
    context.destroy(linger=0)
    assert not scheduler_hooks.has_mail(None)


def test_a_round_knows_the_queue_and_its_batch_the_new_lengths(monkeypatch):
    """Red if a round does not know who waits, or its batch how long it is."""
    result = SimpleNamespace(
        lens="device", host_lens=torch.tensor([3, 4]), num_more_passes=3
    )
    metrics = SimpleNamespace(spec_num_forward_ct=0, spec_num_correct_drafts=9)
    monkeypatch.setattr(SCHEDULER, "metrics_reporter", metrics)
    seen = []

    def run_batch(scheduler, batch, pp_proxy_tensors=None):
        queue = getattr(batch, QUEUE, None)
        seen.append(queue and queue.num_waiting)
        return result

    batch = SimpleNamespace(reqs=[1], seq_lens=1, seq_lens_cpu=2, seq_lens_sum=3)
    args = (run_batch, SCHEDULER, batch)
    assert scheduler_hooks.run_round(*args, pp_proxy_tensors=None) is result
    assert seen == [6]
    assert batch.seq_lens_sum == 7
    assert metrics.spec_num_forward_ct == 3


def test_a_round_goes_on_behind_what_is_decided_ahead():
    """Red if tokens decided ahead of the output are decided again, or their KV is
    written again; or if what the hook has noted does not reach the round."""
    batch = SimpleNamespace(
        reqs=[SimpleNamespace(output_ids=[1, 2], grammar=None)],
        req_pool_indices_cpu=torch.tensor([3]),
        seq_lens_cpu=torch.tensor([9]),
        sampling_info=plain_sampling(64),
        return_hidden_states=False,
    )
    state = SimpleNamespace(client=None, ready=(7, 8))
    round = open_round(batch, [state], [0])
    (r,) = round
    assert (r.row, r.seq_len, r.bonus_token, r.output_len) == (3, 11, 8, 4)
    assert round.num_waiting == 0
    setattr(batch, QUEUE, Queue(3))
    assert open_round(batch, [state], [0]).num_waiting == 3


def test_the_lengths_of_a_round_are_not_read_back():
    """Red if SGLang goes on from lengths of before the round, or those of a prefill,
    which it keeps itself, are touched."""
    known = SimpleNamespace(lens="device", host_lens=torch.tensor([3, 4]))
    batch = SimpleNamespace(seq_lens=1, seq_lens_cpu=2, seq_lens_sum=3)
    scheduler_hooks.keep_lens(batch, known)
    assert (batch.seq_lens, batch.seq_lens_sum) == ("device", 7)
    assert batch.seq_lens_cpu.tolist() == [3, 4]
    scheduler_hooks.keep_lens(batch, SimpleNamespace())
    assert batch.seq_lens_sum == 7


def text_request(text, *, field="parse_draft", output=()) -> SimpleNamespace:
    params = SimpleNamespace(custom_params={field: text})
    return SimpleNamespace(sampling_params=params, output_ids=list(output))


@pytest.fixture
def admit(monkeypatch):
    """Requests of a batch, and the next one -> whether it joins them."""
    monkeypatch.setattr(scheduler_hooks, "longest_pass", lambda: 10)

    def run(taken, req):
        adder = SimpleNamespace(can_run_list=taken)
        found = scheduler_hooks.admit_texts(lambda *_: "original", adder, req)
        assert found in ("original", AddReqResult.OTHER)
        return found == "original"

    return run


def test_texts_of_one_prefill_fit_into_one_pass(admit):
    """Red if a scheduler step is longer than a prefill and a pass, or a request waits
    that need not."""
    assert admit([text_request("abcde")], text_request("fghij"))
    assert not admit([text_request("abcde")], text_request("fghijk"))
    assert not admit([text_request("abcde")], text_request("\u00e4" * 3))
    # A text that is alone in its batch is always admitted.
    plain = SimpleNamespace(
        sampling_params=SimpleNamespace(custom_params=None), output_ids=[]
    )
    assert admit([plain], text_request("a" * 99))
    assert admit([text_request("a" * 99)], plain)
    # These bring no pass along with their prefill, or one that waits for room.
    assert admit([text_request("a" * 99)], text_request("b" * 99, output=[1]))
    judged = text_request("a" * 99, field="parse_verify")
    assert admit([judged], text_request("b" * 10))
