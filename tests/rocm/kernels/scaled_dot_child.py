"""Runs pytest with an interpreter that has ``tl.dot_scaled``, and tells as JSON, in its last line,
which products met in it and in which kernels.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest


def main() -> int:
    import triton
    from triton.runtime import interpreter

    products: set[str] = set()
    kernels: set[str] = set()
    meet = interpreter.InterpreterBuilder.create_dot_scaled

    def noted(self: Any, *args: Any) -> Any:
        products.add(f"{named(args[2])} by {named(args[5])}")
        frame = sys._getframe()
        while frame.f_back is not None:
            frame = frame.f_back
            if frame.f_code.co_name.endswith("_kernel"):
                kernels.add(frame.f_code.co_name)
                break
        return meet(self, *args)

    interpreter.InterpreterBuilder.create_dot_scaled = noted
    code = int(pytest.main(sys.argv[1:]))
    told = {"triton": triton.__version__, "products": sorted(products), "kernels": sorted(kernels)}
    print(json.dumps(told))
    return code


def named(format: Any) -> str:
    return str(getattr(format, "name", format)).lower()


if __name__ == "__main__":
    sys.exit(main())
