"""What an operator asked for, resolved: the one argument of ``Backend.open``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ml4core.api.backend import Device
from ml4core.api.model import ModelSpec

CORE_SWITCHES = (
    "device",
    "decode_backend",
    "activations",
    "fp8_moe_requant",
    "fp8_moe_requant_act",
    "fp8_moe_requant_rule",
)
"""Keys of ``additional_config`` that core reads. A backend's own are those of the object under its
name.
"""


@dataclass(frozen=True)
class Deployment:
    """A model, a device and every choice that shapes a session. Names are those of the flags.

    Attributes:
        dtype: ``float32`` or ``bfloat16``: activations and residual.
        kv_layout, index_layout: layout ids, already resolved from ``--kv-cache-dtype``.
        weight_formats: formats of the checkpoint's matrices.
        weight_bytes: bytes of the checkpoint's tensors; of those that are converted while they are
            loaded, of what they become.
        block_size: tokens a page.
        data_parallel_rank: which of ``data_parallel_size`` replicas this process's engine is.
        data_parallel_address, data_parallel_rpc_port: where replicas meet; "" and 0 with one.
        spanning_session: one session, in one process, drives all tensor parallel ranks of a
            replica: ``feature:spanning_session``. It gets weights that aren't cut over them.
        cudagraph_capture_sizes: rows of the steps that are captured, ascending; empty: the
            backend's choice.
        needs: capability words that this deployment needs.
        attention_config, additional_config: parsed JSON of those flags. A backend refuses each key
            that neither core nor itself reads, see ``unknown_switches``.
    """

    model: ModelSpec
    device: Device
    dtype: str = "float32"
    kv_layout: str = "fp32"
    index_layout: str = "fp32"
    weight_formats: frozenset[str] = frozenset()
    weight_bytes: int = 0
    block_size: int = 64
    max_model_len: int = 0
    max_num_seqs: int = 1
    max_num_batched_tokens: int = 512
    gpu_memory_utilization: float = 0.9
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    data_parallel_rank: int = 0
    data_parallel_address: str = ""
    data_parallel_rpc_port: int = 0
    decode_context_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    enable_expert_parallel: bool = False
    spanning_session: bool = False
    nnodes: int = 1
    enforce_eager: bool = False
    cudagraph_capture_sizes: tuple[int, ...] = ()
    seed: int = 0
    needs: frozenset[str] = frozenset()
    attention_config: Mapping[str, object] = field(default_factory=dict, hash=False)
    speculative_config: Mapping[str, object] = field(default_factory=dict, hash=False)
    additional_config: Mapping[str, object] = field(default_factory=dict, hash=False)

    @property
    def data_parallel_runtime_address(self) -> str:
        """``host:port`` at the first replica's host, where its session may listen for those of the
        others: the port behind the one that core uses. "" with one replica.
        """
        if not self.data_parallel_address:
            return ""
        host = self.data_parallel_address
        host = f"[{host}]" if ":" in host else host
        return f"{host}:{self.data_parallel_rpc_port + 1}"
