"""Triton's interpreter, chosen before kernels are imported: import this first."""

import os
from dataclasses import replace

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import triton.language as tl
from triton.language import core  # noqa: F401
from triton.runtime import interpreter


def _patch_language_once() -> None:
    """The interpreter does so at every call of every function, which is a third of its time.

    It finds what to patch in the globals of a function, such as those of this one.
    """
    interpreter._patch_lang(_patch_language_once)
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()  # which restores nothing


def _leave_out_what_is_thrown_away() -> None:
    """An overflow is looked for in every sum and product, and reported only where `debug` is set.

    A value's type in NumPy is looked up as often, in a table that is made for each look.
    """
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)
    look_up, found = interpreter._get_np_dtype, {}

    def np_dtype(of: tl.dtype) -> np.dtype:
        name = of.scalar.name
        if name not in found:
            found[name] = look_up(of)
        return found[name]

    interpreter._get_np_dtype = np_dtype


_patch_language_once()
_leave_out_what_is_thrown_away()
