"""Attention of whole sequences, by the fastest kernel that this device has."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

Kernel = Literal["any", "padded", "cudnn"]
"""`padded`: flash kernels take one width for queries and values, so values get zeros behind.
`cudnn`: takes both as they are. `any`: torch's choice."""
KERNELS: tuple[Kernel, ...] = get_args(Kernel)


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, chosen: Tensor | None, kernel: Kernel = "any"
) -> Tensor:
    """[B, T, N, V] of q, k [B, T, N, D] and v [B, T, N, V].

    `chosen` bool [B, T, T]: the keys of each query; None: all up to its own position.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if chosen is not None:
        bias = torch.zeros_like(chosen, dtype=q.dtype).masked_fill(~chosen, float("-inf"))
        bias = bias.unsqueeze(1).expand(-1, q.shape[1], -1, -1)
        return F.scaled_dot_product_attention(q, k, v, bias, scale=scale).transpose(1, 2)
    width = v.shape[-1]
    if kernel == "padded" and width < q.shape[-1]:
        v = F.pad(v, (0, q.shape[-1] - width))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if kernel == "cudnn" else nullcontext():
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    return out[..., :width].transpose(1, 2)


def weights_of_rows(q: Tensor, k: Tensor, rows: Tensor, scale: float) -> Tensor:
    """Each key's largest attention weight in any head, fp32 [B, Q, T], of the queries at positions
    `rows`.

    q [B, Q, N, D], k [B, T, N, D], rows [B, Q].
    """
    scores = torch.einsum("bqnd,btnd->bnqt", q, k).float() * scale
    hidden = torch.arange(k.shape[1], device=k.device) > rows.unsqueeze(-1)
    return scores.masked_fill(hidden.unsqueeze(1), float("-inf")).softmax(-1).amax(1)


def fastest_kernel(
    batch: int, length: int, heads: int, width: int, value: int, device: torch.device
) -> Kernel:
    """The kernel that is fastest forward and backward, and right, on these sizes."""
    if device.type != "cuda":
        return "any"
    torch.manual_seed(0)
    q, k = (
        torch.randn(batch, length, heads, width, device=device, dtype=torch.bfloat16)
        for _ in range(2)
    )
    v = torch.randn(batch, length, heads, value, device=device, dtype=torch.bfloat16)
    found: dict[Kernel, float] = {}
    outs: dict[Kernel, tuple[Tensor, ...]] = {}
    kernels: tuple[Kernel, ...] = ("padded", "cudnn")
    for kernel in kernels:
        try:
            outs[kernel], found[kernel] = _timed(q, k, v, kernel)
        except RuntimeError as error:
            print(f"attention {kernel}: {str(error).splitlines()[0]}", flush=True)
    if "cudnn" in outs and "padded" in outs:
        for one, other in zip(outs["cudnn"], outs["padded"], strict=True):
            if not (one - other).norm() < 0.02 * other.norm():
                print("attention cudnn: differs from the other kernel; not used", flush=True)
                found.pop("cudnn", None)
    times = ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in found.items())
    print(f"attention [{batch},{length},{heads},{width}/{value}]: {times}", flush=True)
    return min(found, key=found.__getitem__, default="any")


def _timed(q: Tensor, k: Tensor, v: Tensor, kernel: Kernel) -> tuple[tuple[Tensor, ...], float]:
    """Output and gradients, and seconds a call."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    grad = torch.ones_like(v)
    for attempt in range(4):
        if attempt == 1:  # the first one sets up
            torch.cuda.synchronize(q.device)
            start = time.perf_counter()
        out = attend(q, k, v, q.shape[-1] ** -0.5, None, kernel)
        grads = torch.autograd.grad(out, (q, k, v), grad)
    torch.cuda.synchronize(q.device)
    return (out.detach().float(), *(g.float() for g in grads)), (time.perf_counter() - start) / 3
