"""Triton's interpreter, chosen before kernels are imported: import this first."""

import os

os.environ["TRITON_INTERPRET"] = "1"

import triton.language as tl  # noqa: F401
from triton.language import core  # noqa: F401
from triton.runtime import interpreter


def _patch_language_once() -> None:
    """The interpreter does so at every call of every function, which is a third of its time.

    It finds what to patch in the globals of a function, such as those of this one.
    """
    interpreter._patch_lang(_patch_language_once)
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()  # which restores nothing


_patch_language_once()
