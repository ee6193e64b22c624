"""The smallest backend that serves: core's compositions on the host, and one op of its own."""

from ml4core.api import Capabilities, Device, KVCache, Probe, hookimpl, refuse_missing


class Eager:
    def compile(self, step, shape):
        return step

    def eager_break(self, function):
        return function


class Session:
    layouts = {}  # noqa: RUF012
    collectives = None
    executor = Eager()

    def __init__(self, deployment):
        self.device = deployment.device
        self.ops = {"silu_mul": silu_mul}

    def providers(self, stage, layer, shape):
        return ()

    def prepare_weights(self, weights, layer, part="decoder"):
        return weights

    def alloc_kv(self, layout, blocks, block_size):
        import torch

        layout.check_block_size(block_size)
        return KVCache(
            layout,
            block_size,
            tuple(
                torch.zeros(part.shape(blocks, block_size), dtype=getattr(torch, part.dtype))
                for part in layout.parts
            ),
        )

    def fault(self):
        return None

    def close(self):
        return None


class Backend:
    name = "example-api1"
    priority = 0

    def probe(self):
        return Probe((Device("real", "host", "host", "cpu"),))

    def capabilities(self, device):
        words = {"feature:compose", "op:silu_mul", "act:fp32", "kv:fp32", "index:fp32"}
        return Capabilities(
            frozenset(words | {"weights:bf16", "weights:fp32"}),
            {"dtype": "float32", "kv": "fp32", "index": "fp32"},
        )

    def open(self, deployment):
        refuse_missing(deployment, self.capabilities(deployment.device), self.name)
        return Session(deployment)


def silu_mul(gate_up):
    import torch

    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


@hookimpl
def ml4core_backends():
    return [Backend()]
