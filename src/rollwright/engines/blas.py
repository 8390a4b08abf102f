"""How many threads numpy's BLAS uses: a process-wide number that only the library itself can be asked to change."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util

__all__ = ["set_blas_threads"]

_SYMBOLS = ("scipy_openblas_{}64_", "openblas_{}64_", "openblas_{}")


def set_blas_threads(count: int) -> int:
    """Let BLAS use `count` threads and return the old number. A BLAS other than OpenBLAS is left as it is.

    Small matrices (a tiny policy) are two to four times *slower* with two threads than with one.
    """
    library = _numpy_library()
    for symbol in _SYMBOLS:
        try:
            get, put = (getattr(library, symbol.format(f"{verb}_num_threads")) for verb in ("get", "set"))
        except AttributeError:
            continue
        before = int(get())
        put(ctypes.c_int(count))
        return before
    return count


def _numpy_library() -> ctypes.CDLL:
    # dlsym on numpy's core module also looks into the libraries it was linked with.
    name = "numpy._core" if importlib.util.find_spec("numpy._core") else "numpy.core"
    return ctypes.CDLL(str(importlib.import_module(f"{name}._multiarray_umath").__file__))
