"""Launches that are recorded instead of made, to be compiled ahead with no GPU.

The ops themselves are called, on tensors without data. So what is compiled is what a session of
such shapes launches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from math import prod
from typing import Any

_INT32_MAX = 2**31 - 1
_OPTIONS = (
    "num_warps", "num_stages", "num_ctas",
    "maxnreg", "launch_pdl",  # NVIDIA's
    "matrix_instr_nonkdim", "waves_per_eu", "kpack",  # AMD's
)  # fmt: skip
_TYPES = {
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "bool": "i1",
    "uint8": "u8",
    "uint16": "u16",
    "int8": "i8",
    "int16": "i16",
    "int32": "i32",
    "int64": "i64",
}


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel.

    Attributes:
        arguments: by name of the kernel's parameters.
        options: ``num_warps`` and the like.
        programs: of its grid.
    """

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, int]
    programs: int

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__)


@dataclass(frozen=True)
class Case:
    """An op's call at shapes worth knowing.

    Attributes:
        call: calls the op on tensors of the ``meta`` device.
        hot: whether a spill is a fault: what a decode step of the full model launches.
        wants: architecture -> a pattern that a matrix instruction of one of its kernels matches.
        archs: those it is for; all if none is named.
    """

    name: str
    call: Callable[[], object]
    hot: bool = True
    wants: Mapping[str, str] = field(default_factory=dict)
    archs: tuple[str, ...] = ()


class Ahead:
    """A driver of an architecture without its device: kernels that ask what they are compiled for
    are told, and triton makes the keys that it would look for there.
    """

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def launches(case: Case, ahead: AbstractContextManager[None], *, near: bool) -> list[Launch]:
    """The launches of a case, each distinct one once; see ``specialised`` for ``near``. ``ahead``
    says what they are for.
    """
    with ahead, recorded() as found:
        case.call()
    return list({key_of(launch, near=near): launch for launch in reversed(found)}.values())[::-1]


def key_of(launch: Launch, *, near: bool) -> str:
    """The same for launches of one compiled kernel."""
    parts = (launch.name, *specialised(launch, near=near), sorted(launch.options.items()))
    return repr(tuple(map(str, parts)))


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """While it lasts, launches of this process are noted and not made."""
    from triton.runtime.jit import JITFunction

    found: list[Launch] = []

    def note(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        options = {key: named.pop(key) for key in _OPTIONS if key in named}
        arguments = dict(zip(self.arg_names, args, strict=False)) | named
        found.append(Launch(self, arguments, options, prod(grid)))

    original = JITFunction.run
    JITFunction.run = note
    try:
        yield found
    finally:
        JITFunction.run = original


def specialised(
    launch: Launch, *, near: bool
) -> tuple[dict[str, str], dict[tuple[int, ...], Any], dict[tuple[int, ...], Any]]:
    """Signature, constants and attributes, as triton derives them from a launch: 1 is a constant,
    and so is None; addresses and sizes that 16 divides are told to be such, and arrays below 2 GiB
    to be reached by 32-bit offsets where a backend asks for it (``near``).
    """
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments.get(parameter.name, parameter.default)
        place = (index,)
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1):
            signature[parameter.name] = "constexpr"
            constants[place] = value
            continue
        signature[parameter.name] = _type_of(value)
        if hasattr(value, "dtype"):
            attributes[place] = [["tt.divisibility", 16]]
            if near and value.numel() * value.element_size() <= _INT32_MAX:
                attributes[place].append(["tt.pointer_range", 32])
        elif type(value) is int and value % 16 == 0:
            attributes[place] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def compiled(launch: Launch, target: Any, *, near: bool) -> Any:
    """What triton makes of a launch for a ``GPUTarget``. Raises what triton raises."""
    import triton
    from triton.compiler import ASTSource
    from triton.runtime import driver

    made: Any = ASTSource
    if launch.kernel.is_gluon():
        from triton.experimental.gluon import _runtime

        made = _runtime.GluonASTSource
    source = made(launch.kernel, *specialised(launch, near=near))
    driver.set_active(Ahead(target))
    try:
        return triton.compile(source, target=target, options=dict(launch.options))
    finally:
        with suppress(RuntimeError):  # without a GPU there is no driver to go back to
            driver.reset_active()


def _type_of(value: Any) -> str:
    """The type of a launch's argument in triton's words."""
    if hasattr(value, "dtype"):
        return "*" + _TYPES[str(value.dtype).removeprefix("torch.")]
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i64" if value > _INT32_MAX or value < -_INT32_MAX - 1 else "i32"
    if isinstance(value, float):
        return "fp32"
    raise TypeError(f"no kernel takes a {type(value).__name__}")
