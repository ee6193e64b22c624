"""How large the pools are, from flags and from what will be wanted; errors name the values that
would fit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ml4core.api import Deployment, KVLayout, Refusal, Refused
from ml4core.engine import resolve
from ml4core.engine.args import EngineArgs
from ml4core.engine.errors import RequestError
from ml4core.engine.memory_plan import UTILIZATION, Profile
from ml4core.planning import kv

Groups = tuple[kv.KVGroup, ...]


@dataclass(frozen=True)
class Wanted:
    """What caches are for: up to ``sequences`` sequences of ``tokens_each`` tokens, None: of the
    whole context. ``fill``: for requests that are not known yet: all the room that there is.
    """

    sequences: int = 1
    tokens_each: int | None = None
    fill: bool = False


def cache_groups(deployment: Deployment, private: Mapping[str, KVLayout]) -> Groups:
    """The groups of a deployment's caches. Raises ``Refused`` if a private layout is missing."""
    groups = kv.target_groups(deployment.model, _layouts(deployment, private))
    if deployment.model.draft is not None:
        groups = (*groups, kv.draft_group(deployment.model.draft))
    return groups


def plan_caches(
    args: EngineArgs,
    deployment: Deployment,
    private: Mapping[str, KVLayout],
    wanted: Wanted,
    profile: Profile | None = None,
) -> kv.Pools:
    """Pools for what is wanted, of up to ``max_num_seqs`` sequences.

    With ``--kv-cache-memory-bytes`` they take that much, with ``--num-gpu-blocks-override`` they
    have that many pages. ``profile``: what the process takes of the device; None where nobody knows
    more than the bytes of the weights.

    Raises ``RequestError`` if one sequence doesn't fit, or if pools and memory don't go together;
    ``Refused`` if a private layout is missing.
    """
    groups = cache_groups(deployment, private)
    sizing = _Sizing(args, deployment, groups, wanted, profile)
    if args.num_gpu_blocks_override is not None:
        return sizing.of_blocks(args.num_gpu_blocks_override)
    if args.kv_cache_memory_bytes is not None:
        return sizing.of_bytes(args.kv_cache_memory_bytes)
    if wanted.fill and profile is not None:
        return sizing.of_room(profile)
    return sizing.needed()


class _Sizing:
    def __init__(
        self,
        args: EngineArgs,
        deployment: Deployment,
        groups: Groups,
        wanted: Wanted,
        profile: Profile | None,
    ) -> None:
        longest, most = deployment.max_model_len, deployment.max_num_seqs
        self._tokens = min(wanted.tokens_each or longest, longest)
        self._count = max(1, min(wanted.sequences, most))
        self._deployment = deployment
        self._groups = groups
        self._size = deployment.block_size
        self._ranks = deployment.decode_context_parallel_size
        self._share = deployment.gpu_memory_utilization
        self._profile = profile

    def of_bytes(self, budget: int) -> kv.Pools:
        flag = "--kv-cache-memory-bytes"
        self._check_bytes(flag, budget, budget, lambda most: most)
        pools = self._within(budget, self._count, self._tokens)
        if pools is None or not pools.requests(self._tokens):
            fits = 0 if pools is None else pools.tokens
            longest = f"--max-model-len {fits} or less" if fits else "a smaller --block-size"
            least = self._least(self._count, self._tokens)
            works = f"at least {least} for one sequence of {self._tokens} tokens"
            if self._deployment.model.draft is not None and self._count > 1:
                works += f" and the drafts of {self._count}"
            raise RequestError(flag, budget, f"{works}, or {longest}")
        return pools

    def of_blocks(self, blocks: int) -> kv.Pools:
        """``blocks`` pages of each group that keeps whole contexts, null pages included."""
        flag = "--num-gpu-blocks-override"
        needed = kv.pools_for(self._groups, self._size, self._tokens, self._count, self._ranks)
        full = [group for group in self._groups if group.window is None]
        sizes = dict(needed.blocks) | {group.name: blocks for group in full}
        pools = kv.Pools(self._groups, sizes, self._size, self._ranks)
        page = sum(group.page_bytes(self._size) for group in full)
        windowed = pools.nbytes - blocks * page
        self._check_bytes(flag, blocks, pools.nbytes, lambda most: max(0, most - windowed) // page)
        if not pools.requests(self._tokens):
            least = max(
                group.pages(self._tokens, self._size, self._ranks) + kv.NULL_PAGES for group in full
            )
            raise RequestError(
                flag,
                blocks,
                f"at least {least} for one sequence of {self._tokens} tokens, or --max-model-len "
                f"{pools.tokens} or less",
            )
        return pools

    def of_room(self, profile: Profile) -> kv.Pools:
        """As many as there is room for, and at least one whole context."""
        room, longest = profile.room(self._share), self._deployment.max_model_len
        pools = self._within(room, self._deployment.max_num_seqs, longest)
        if pools is None or not pools.requests(longest):
            fits = 0 if pools is None else pools.tokens
            least = self._least(self._deployment.max_num_seqs, longest)
            raise RequestError(
                "--max-model-len",
                longest,
                (f"{fits} or less, " if fits else "")
                + f"a larger {UTILIZATION} than {self._share:g}, or a smaller "
                f"--max-num-batched-tokens or --max-num-seqs: one such sequence needs {least} "
                f"bytes of caches, and {room} are left; {profile.told()}",
            )
        return pools

    def needed(self) -> kv.Pools:
        pools = kv.pools_for(self._groups, self._size, self._tokens, self._count, self._ranks)
        room, told = self._room(self._share)
        if room is not None and pools.nbytes > room:
            windowed = sum(pools.bytes_of(g) for g in self._groups if g.window is not None)
            page = sum(g.page_bytes(self._size) for g in self._groups if g.window is None)
            # Pages of each sequence.
            pages = max(0, (room - windowed) // page - kv.NULL_PAGES) // self._count
            fits = pages * self._size * self._ranks
            remedy = f"--max-model-len {fits} or less" if fits else "a device with more memory"
            raise RequestError(
                "--max-model-len",
                self._tokens,
                f"{remedy}: {self._count} x {self._tokens} tokens need {pools.nbytes} bytes of "
                f"caches, and beside {told} there are {max(room, 0)} "
                f"({UTILIZATION} {self._share})",
            )
        return pools

    def _least(self, sequences: int, tokens: int) -> int:
        """Bytes in which one sequence has room."""
        return kv.least_pools(self._groups, self._size, tokens, sequences, self._ranks).nbytes

    def _within(self, budget: int, sequences: int, longest: int) -> kv.Pools | None:
        return kv.pools_within(self._groups, self._size, budget, sequences, longest, self._ranks)

    def _room(self, share: float | None) -> tuple[int | None, str]:
        """Bytes for caches, None if nobody knows; and what else there is, in words."""
        if self._profile is not None:
            return self._profile.room(share), f"what else is there ({self._profile.told()})"
        memory, weights = self._deployment.device.memory_bytes, self._deployment.weight_bytes
        room = int(memory * (1.0 if share is None else share)) - weights
        return (room if memory else None), f"{weights} bytes of weights"

    def _check_bytes(
        self, flag: str, value: int, nbytes: int, most_of: Callable[[int], int]
    ) -> None:
        """Raises ``RequestError`` if the device hasn't that much beside all else: a size that is
        given isn't bound by the share.
        """
        room, _ = self._room(None)
        if room is None or nbytes <= room:
            return
        beside = max(0, room)
        memory = self._deployment.device.memory_bytes
        told = f"the weights take {self._deployment.weight_bytes}"
        if self._profile is not None:
            memory, told = self._profile.total, self._profile.told()
        raise RequestError(
            flag, value, f"at most {most_of(beside)}: the device has {memory} bytes, and {told}"
        )


def _layouts(deployment: Deployment, private: Mapping[str, KVLayout]) -> dict[str, KVLayout]:
    """By group. Raises ``Refused`` for private ones that the session doesn't bring, or brings for
    rows of another width than the model's.
    """
    chosen = {"latent": deployment.kv_layout, "index": deployment.index_layout}
    names = ", ".join(private) or "none"
    lacking = [
        Refusal("core", f"cache layout {id}", f"the session brings no such layout; it has {names}")
        for id in chosen.values()
        if id.startswith(resolve.PRIVATE) and id not in private
    ]
    layers = deployment.model.layers
    widths = [
        (deployment.kv_layout, layers[0].kv_lora_rank + max(layer.rope_dim for layer in layers)),
        *((deployment.index_layout, own.head_dim) for layer in layers if (own := layer.indexer)),
    ]
    for id, width in widths:
        if id in private and private[id].width != width:
            reason = f"the session's rows have {private[id].width} values, the model's {width}"
            lacking.append(Refusal("core", f"cache layout {id}", reason))
    if lacking:
        raise Refused(lacking)
    return {
        "latent": private.get(deployment.kv_layout) or resolve.latent(deployment),
        "index": private.get(deployment.index_layout) or resolve.index(deployment),
    }
