"""Memory that members of one machine share: what lies in it travels as a place, not as bytes.

A region is an anonymous file of the kernel's (memfd) that peers open through /proc, so that nothing has a
name that could be left behind, and all of it is gone with the last process that has it mapped.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.errors import ProtocolError, enough_files
from shoal.parameters import as_bytes
from shoal.wire import Frame

KNOWN = 1 << 12  # places that are remembered
_PLACE = re.compile(r"(\d{1,10}):(\d{1,7}):(\d{1,19}):(\d{1,19}):(\d{1,19})")


class _Region(NamedTuple):
    """Allocated memory: its addresses, its file descriptor, and what peers call it (process:file:inode)."""

    first: int
    last: int
    file: int
    name: str


class Memory:
    """One member's regions, and those of its peers that it reads.

    Args:
        near: whether a peer can open this member's regions; nobody can where the system has no memfd.

    Attributes:
        mapped: is called with each region (uint8) from now on, as soon as it is there.
    """

    def __init__(self, near: Callable[[str], bool] = lambda peer: False) -> None:
        self.mapped: Callable[[Tensor], None] | None = None
        self._near = near
        self._own: list[_Region] = []
        self._seen: dict[int, memoryview] = {}
        self._placed: dict[int, tuple[Frame, str]] = {}  # by the frame's id
        self._read = lru_cache(KNOWN)(self._look_up)

    def allocate(self, nbytes: int) -> Tensor:
        """Zeroed memory (uint8, `nbytes` long) that near peers can read in place."""
        if nbytes == 0 or not hasattr(os, "memfd_create"):
            return torch.zeros(nbytes, dtype=torch.uint8)
        with enough_files():
            file = os.memfd_create("shoal")
        os.ftruncate(file, nbytes)
        region = _mapped(file, nbytes)
        name = f"{os.getpid()}:{file}:{os.fstat(file).st_ino}"
        self._own.append(_Region(region.data_ptr(), region.data_ptr() + nbytes, file, name))
        if self.mapped is not None:
            self.mapped(region)
        return region

    def place(self, peer: str, frame: Frame) -> str:
        """Where a peer finds a frame that lies in this member's memory; "" if it has to be sent."""
        if isinstance(frame, bytes) or not self._own or not self._near(peer):
            return ""
        _, place = self._placed.get(id(frame), (None, ""))  # the frame is kept, so nothing else has its id
        if not place and (place := self._find(frame)):
            if len(self._placed) >= KNOWN:
                self._placed.clear()
            self._placed[id(frame)] = frame, place
        return place

    def _find(self, frame: bytearray | memoryview) -> str:
        if not len(frame):
            return ""
        start, size = torch.frombuffer(frame, dtype=torch.uint8).data_ptr(), memoryview(frame).nbytes
        for region in reversed(self._own):  # a later one may lie where one that is gone has lain
            if region.first <= start and start + size <= region.last:
                return f"{region.name}:{start - region.first}:{size}"
        return ""

    def at(self, place: str) -> Frame:
        """The bytes at a place that a peer has named; raises ProtocolError where there is no such place."""
        return self._read(place)

    def _look_up(self, place: str) -> memoryview:
        found = _PLACE.fullmatch(place)
        if found is None:
            raise ProtocolError(f"a message says that its bytes lie at {place[:40]!r}, which is no place")
        process, file, inode, offset, nbytes = map(int, found.groups())
        try:
            region = self._seen.get(inode) or self._map(process, file, inode)
        except (OSError, ValueError, RuntimeError) as error:  # torch cannot map it
            raise ProtocolError(f"memory of process {process} cannot be read ({error})") from None
        if offset + nbytes > len(region):
            raise ProtocolError(f"a place of {nbytes} bytes from {offset} on, in a region of {len(region)}")
        return region[offset : offset + nbytes]

    def _map(self, process: int, file: int, inode: int) -> memoryview:
        with enough_files():
            opened = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(opened)
            if not stat.S_ISREG(status.st_mode) or status.st_nlink or status.st_ino != inode:
                raise ValueError("it is not the memory that was meant")  # which has no name in any folder
            region = _mapped(opened, status.st_size)
        finally:
            os.close(opened)
        if self.mapped is not None:
            self.mapped(region)
        self._seen[inode] = as_bytes(region)
        return self._seen[inode]

    def close(self) -> None:
        """Let go of all regions; who has one mapped keeps it until he lets go of its tensors."""
        for region in self._own:
            os.close(region.file)
        self._own.clear()
        self._seen.clear()
        self._placed.clear()
        self._read.cache_clear()


def _mapped(file: int, nbytes: int) -> Tensor:
    """A shared file's memory; unlike Python's mmap it keeps no file open."""
    return torch.from_file(f"/proc/self/fd/{file}", shared=True, size=nbytes, dtype=torch.uint8)
