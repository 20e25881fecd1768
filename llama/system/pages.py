"""Advice to the system about the memory pages of a tensor. Without madvise, nothing happens."""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

LARGE = 2**21  # bytes of a large page
_madvise = getattr(ctypes.CDLL(None), "madvise", None) if hasattr(mmap, "MADV_DONTNEED") else None


def empty_in_large_pages(rows: int, columns: int) -> Tensor:
    """An uninitialized tensor (rows, columns) of bytes, in pages of 2 MB if the system has them.

    The processor finds the addresses of small pages in a table that does not fit into its cache, so it reads large
    pages faster. A tensor smaller than a large page gets small ones.
    """
    size = rows * columns
    if size < LARGE:
        return torch.empty(rows, columns, dtype=torch.uint8)
    memory = torch.empty(size + LARGE, dtype=torch.uint8)
    first = -memory.data_ptr() % LARGE
    out = memory[first : first + size].view(rows, columns)
    _advise(out, "MADV_HUGEPAGE")
    return out


def drop_pages(tensor: Tensor) -> None:
    """Remove the pages of a tensor in a privately mapped file from this process's memory.

    A later access reads them again from the page cache. Only for tensors that were never written to: changes would be
    lost.
    """
    _advise(tensor, "MADV_DONTNEED")


def _advise(tensor: Tensor, advice: str) -> None:
    page = mmap.PAGESIZE
    first = -(-tensor.data_ptr() // page) * page
    length = (tensor.data_ptr() + tensor.nbytes) // page * page - first
    if _madvise is not None and hasattr(mmap, advice) and length > 0 and tensor.is_contiguous():
        _madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), ctypes.c_int(getattr(mmap, advice)))
