"""A trainer that sends weights to a server: as tensors, or through a process group."""

import base64
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

from sglang_parse.demo.servers import HOST, free_port


def post(server, path, status=200, **body):
    reply = server.post(path, body)
    assert reply.status_code == status, reply.text
    return reply.text


@contextmanager
def weight_update(server, selector):
    post(server, "/begin_weight_update", selector=selector)
    yield
    post(server, "/end_weight_update")


def send_tensors(server, weights, status=200, **fields):
    """To the target alone: no selector is named. Returns what the server answers."""
    from sglang.srt.utils import MultiprocessingSerializer

    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        data = MultiprocessingSerializer.serialize(list(weights.items()))
        fields["serialized_named_tensors"] = [base64.b64encode(data).decode()]
        with weight_update(server, "all"):
            return post(server, "/update_weights_from_tensor", status, **fields)
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


class Trainer:
    """Rank 0 of a process group; the server is rank 1."""

    def __init__(self, server):
        from sglang.srt.utils.common import init_custom_process_group

        self.server, self.name, port = server, "weight_update_group", free_port()
        where = {"group_name": self.name, "backend": "gloo", "world_size": 2}
        with ThreadPoolExecutor(1) as helper:
            joined = helper.submit(
                post,
                server,
                "/init_weights_update_group",
                **where,
                master_address=HOST,
                master_port=port,
                rank_offset=1,
            )
            self.group = init_custom_process_group(
                init_method=f"tcp://{HOST}:{port}", rank=0, **where
            )
            joined.result()

    def send(self, weights, selector="target", status=200, **fields):
        """Returns what the server answers."""
        fields |= {
            "names": list(weights),
            "dtypes": ["float32"] * len(weights),
            "shapes": [list(one.shape) for one in weights.values()],
            "selector": selector,
        }
        path = "/update_weights_from_distributed"
        with weight_update(self.server, selector), ThreadPoolExecutor(1) as helper:
            sent = helper.submit(post, self.server, path, status, **fields)
            for one in weights.values():
                torch.distributed.broadcast(one, src=0, group=self.group)
            return sent.result()

    def close(self):
        post(self.server, "/destroy_weights_update_group", group_name=self.name)
        torch.distributed.destroy_process_group(self.group)
