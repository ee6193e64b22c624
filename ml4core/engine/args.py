"""What an operator asks of an engine: every flag as an attribute, checked as a whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ml4core.api import Refusal
from ml4core.engine import graph_capture
from ml4core.engine.errors import ArgumentsError
from ml4core.engine.flag_spec import Flag, flags_of
from ml4core.engine.flags import Features, Memory, Model, Parallel


@dataclass(frozen=True)
class EngineArgs(Features, Model, Memory, Parallel):
    """A model and every flag, named as on the command line in snake case.

    None leaves a choice to the engine. Made only if each value is well formed and they agree:
    else ``ArgumentsError`` lists every fault. Whether this version can serve them is another
    question, see ``refusals``.
    """

    model: str
    """A folder, a hub id ``org/name``, or ``ml4-tiny``, the shipped model."""

    def __post_init__(self) -> None:
        problems = (
            []
            if self.model.strip()
            else ["MODEL: an empty text; works: a folder or a hub id org/name"]
        )
        for field, flag in FLAGS.items():
            if text := flag.problem(getattr(self, field)):
                problems.append(f"{flag.name}: {text}")
        if not problems:  # relations of malformed values would say nothing
            problems += _disagreements(self)
        if problems:
            raise ArgumentsError(problems)

    @classmethod
    def parse(cls, model: str, given: Mapping[str, str | bool | Sequence[str]]) -> EngineArgs:
        """From the texts of a command line: field -> text, texts of a list or JSON flag, or bool.

        Raises ``ArgumentsError`` with every fault of every flag.
        """
        values, problems = {}, []
        for field, text in given.items():
            try:
                values[field] = FLAGS[field].parse(text)
            except ValueError as error:
                problems.append(f"{FLAGS[field].name}: {error}")
        try:
            args = cls(model, **values)
        except ArgumentsError as error:
            problems += error.problems
        if problems:
            raise ArgumentsError(problems)
        return args

    def refusals(self) -> list[Refusal]:
        """Each flag that asks for what has not landed. Empty: this version can serve them all."""
        return [
            refusal
            for field, flag in FLAGS.items()
            for refusal in flag.refusals(getattr(self, field))
        ]


FLAGS: Mapping[str, Flag] = MappingProxyType(flags_of(EngineArgs))
"""Every flag by its field, in the order of the help text."""


def _disagreements(args: EngineArgs) -> Iterator[str]:
    """The relations that flags of vLLM's names must keep, as far as flags alone can tell."""
    yield from _nodes(args)
    yield from _replicas(args)
    yield from _contexts(args)
    if args.speculative_config and "method" not in args.speculative_config:
        yield '--speculative-config: no method; works: {"method": "dspark", ...}'
    if args.enable_ep_weight_filter and not args.enable_expert_parallel:
        yield "--enable-ep-weight-filter: does nothing without --enable-expert-parallel"
    yield from graph_capture.problems(args.cudagraph_capture_sizes, args.compilation_config)
    if args.num_gpu_blocks_override is not None and args.kv_cache_memory_bytes is not None:
        yield (
            "--num-gpu-blocks-override: --kv-cache-memory-bytes sizes the same; works: one of them"
        )
    if args.enable_auto_tool_choice and args.tool_call_parser is None:
        yield "--enable-auto-tool-choice: needs --tool-call-parser"
    rows, sequences = args.max_num_batched_tokens, args.max_num_seqs
    if rows is not None and sequences is not None and rows < sequences:
        yield (
            f"--max-num-batched-tokens: {rows} is less than --max-num-seqs {sequences}, and each "
            "sequence needs a token a step"
        )


def _nodes(args: EngineArgs) -> Iterator[str]:
    nodes, rank, executor = args.nnodes, args.node_rank, args.distributed_executor_backend
    world = (
        args.data_parallel_size
        * args.pipeline_parallel_size
        * args.prefill_context_parallel_size
        * args.tensor_parallel_size
    )
    if executor == "uni" and nodes == 1 and args.tensor_parallel_size > 1:
        yield (
            "--distributed-executor-backend: uni runs one rank; works: mp, with "
            f"--tensor-parallel-size {args.tensor_parallel_size}"
        )
    if rank >= nodes:
        yield (
            f"--node-rank: {rank} is out of range; works: 0 to {nodes - 1}, as --nnodes is {nodes}"
        )
    if nodes > 1:
        if executor not in (None, "mp"):
            yield f"--nnodes: {nodes} needs --distributed-executor-backend mp, not {executor}"
        if world % nodes:
            yield (
                f"--nnodes: {nodes} does not divide the {world} ranks (data x pipeline x prefill "
                "context x tensor)"
            )
        if args.headless and rank == 0:
            yield "--headless: node 0 hosts the server; works: on the other nodes"
        if not args.headless and rank > 0:
            yield f"--node-rank: node {rank} hosts no server; add --headless"
    elif args.headless and not args.data_parallel_start_rank:
        yield (
            "--headless: one node alone would answer nobody; works: with --nnodes above 1, or with "
            "--data-parallel-start-rank above 0"
        )


def _replicas(args: EngineArgs) -> Iterator[str]:
    total, local = args.data_parallel_size, args.data_parallel_size_local
    start = args.data_parallel_start_rank
    last = total - (local or 1)
    if last < 0:
        yield f"--data-parallel-size-local: {local} is more than --data-parallel-size {total}"
    elif start is not None and start > last:
        yield (
            f"--data-parallel-start-rank: {start} is out of range; works: 0 to {last}, as "
            f"--data-parallel-size is {total} with {local or 1} local"
        )


def _contexts(args: EngineArgs) -> Iterator[str]:
    dcp, pcp = args.decode_context_parallel_size, args.prefill_context_parallel_size
    tp, interleave = args.tensor_parallel_size, args.cp_kv_cache_interleave_size
    if pcp == 1 and tp % dcp:
        yield f"--decode-context-parallel-size: {dcp} does not divide --tensor-parallel-size {tp}"
    if pcp > 1 and dcp not in (1, pcp, tp * pcp):
        works = ", ".join(str(size) for size in sorted({1, pcp, tp * pcp}))
        yield (
            f"--decode-context-parallel-size: {dcp} does not fit --prefill-context-parallel-size "
            f"{pcp} and --tensor-parallel-size {tp}; works: {works}"
        )
    needs = "does nothing without --decode-context-parallel-size above 1"
    if dcp == 1 and args.dcp_comm_backend != "ag_rs":
        yield f"--dcp-comm-backend: {args.dcp_comm_backend} {needs}"
    if dcp == 1 and args.dcp_q_replicate:
        yield f"--dcp-q-replicate: {needs}"
    if dcp == pcp == 1 and interleave > 1:
        yield f"--cp-kv-cache-interleave-size: {interleave} {needs}"
    if args.block_size is not None and args.block_size % interleave:
        yield (
            f"--cp-kv-cache-interleave-size: {interleave} does not divide --block-size "
            f"{args.block_size}"
        )
