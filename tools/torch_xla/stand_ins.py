"""Stand-ins for the CUDA libraries that torch's only x86-64 wheel of 2.9 on PyPI links against.

    python stand_ins.py SITE_PACKAGES/torch

Without a GPU none of them is ever called, but the loader wants each with every symbol. So each
missing one is compiled as an empty library of that name: its functions return cudaErrorNoDevice.
What is there is left alone. Needs gcc and binutils; takes seconds, where the real ones are 2.9 GB.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

NO_DEVICE = 100
_OWN = ("libtorch*.so*", "libc10*.so*", "libcaffe2*.so*", "libshm*.so*")
_CUDA = re.compile(r"lib(cu|nccl|nvshmem|nvrtc|nvJit|nvToolsExt)")
_SYSTEM_VERSION = re.compile(r"(GLIBC|CXXABI|GCC|GOMP|OMP|LIBC)")
_CUDA_SYMBOL = re.compile(r"(cu[A-Zbdfrs]|__cuda|nccl|nvshmem|nvtx|cupti|nvrtc)")
_BODIES: Mapping[str, str] = {
    "__cudaRegisterFatBinary": "static void *h[8]; return h;",
    "cudaGetDeviceCount": f"if (n) *(int *)n = 0; return (void *){NO_DEVICE};",
    "cudaGetErrorString": 'return "no CUDA here";',
    "cudaGetErrorName": 'return "cudaErrorNoDevice";',
    "cudaGetLastError": "return 0;",
    "cudaPeekAtLastError": "return 0;",
    "cudaDriverGetVersion": "if (n) *(int *)n = 0; return 0;",
}
"""What torch calls as it is imported; everything else only has to exist."""


def main(torch: Path) -> None:
    libraries = [file for pattern in _OWN for file in (torch / "lib").glob(pattern)]
    here = {file.name for file in libraries}
    missing = sorted(
        name
        for name in {name for file in libraries for name in needed(file)}
        if _CUDA.match(name) and name not in here
    )
    versioned: dict[str, set[str]] = defaultdict(set)
    loose: set[str] = set()
    for file in libraries:
        for symbol, version in undefined(file):
            if version and not _SYSTEM_VERSION.match(version):
                versioned[version].add(symbol)
            elif not version and _CUDA_SYMBOL.match(symbol):
                loose.add(symbol)
    loose -= set().union(*versioned.values())
    nodes: dict[str, dict[str, set[str]]] = {name: {} for name in missing}
    for version, symbols in versioned.items():
        home = home_of(version, missing)
        nodes.setdefault(home, {})[version] = symbols
    # Symbols without a version live in a library without versions.
    sink = next((name for name in nodes if not nodes[name] and name.startswith("libnccl")), "")
    sink = sink or next(name for name in nodes if not nodes[name])
    for name, versions in nodes.items():
        build(torch / "lib" / name, versions, loose if name == sink else ())
    print(f"{len(nodes)} stand-ins in {torch / 'lib'}")


def needed(library: Path) -> list[str]:
    return re.findall(r"NEEDED.*\[(.+?)\]", _output("readelf", "-d", library))


def undefined(library: Path) -> Iterable[tuple[str, str]]:
    """Each symbol that a library wants, and its version; "" without."""
    listed = _output("nm", "-D", "--undefined-only", "--with-symbol-versions", library)
    for line in listed.splitlines():
        symbol, _, version = line.split()[-1].partition("@")
        yield symbol, version.lstrip("@")


def home_of(version: str, libraries: Iterable[str]) -> str:
    """The library that a version of symbols belongs to: most are called after it."""
    if version in libraries:
        return version
    return next((name for name in libraries if version.lower() in name.lower()), version)


def build(library: Path, versions: Mapping[str, set[str]], loose: Iterable[str]) -> None:
    symbols = sorted(set(loose).union(*versions.values()))
    source = "".join(
        f"void *{symbol}(void *n) {{ {_BODIES.get(symbol, f'return (void *){NO_DEVICE};')} }}\n"
        for symbol in symbols
    )
    with tempfile.TemporaryDirectory() as folder:
        code = Path(folder) / "stand_in.c"
        code.write_text(source, "utf-8")
        command = ["gcc", "-w", "-shared", "-fPIC", "-O1", "-o", str(library), str(code)]
        command.append(f"-Wl,-soname,{library.name}")
        if versions:
            script = Path(folder) / "versions.map"
            script.write_text(
                "".join(
                    f"{version} {{ global: {' '.join(f'{one};' for one in sorted(of))} }};\n"
                    for version, of in versions.items()
                ),
                "utf-8",
            )
            command.append(f"-Wl,--version-script={script}")
        subprocess.run(command, check=True)


def _output(*command: object) -> str:
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=True
    )
    return done.stdout


if __name__ == "__main__":
    main(Path(sys.argv[1]))
