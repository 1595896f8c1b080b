"""Parameters on GPUs: their gradients and values are copied beside the computing, by streams of their own."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Self

import torch
from torch import Tensor


class Stage:
    """The copies between a worker's GPUs and the host's memory; there is none where all is on the CPU.

    A gradient is copied while backward goes on. Until its copy is done nobody may read the slot: a chunk is
    sent when another gradient comes and finds its copies done, at the latest at `step()`.

    Args:
        devices: GPUs that hold something of the model.
        note: tells the user something, once.
        cuda: what gives streams and events: torch.cuda.
    """

    def __init__(
        self, devices: Iterable[torch.device], note: Callable[[str], None], cuda: Any = torch.cuda
    ) -> None:
        self._lock = threading.Lock()
        self._cuda, self._note = cuda, note
        self._streams = {device: cuda.Stream(device) for device in devices}
        self._first = next(iter(self._streams))
        self._copies: dict[int, list[tuple[Any, Tensor]]] = {}  # with what is copied, so that it stays
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self._lent: list[tuple[Any, Tensor]] = []
        self._pinned: list[Tensor] = []

    @classmethod
    def of(cls, tensors: Iterable[Tensor], note: Callable[[str], None]) -> Self | None:
        """The stage of a model; None where none of its tensors is on a GPU."""
        devices = {tensor.device: None for tensor in tensors if tensor.is_cuda}
        return cls(devices, note) if devices else None

    # Gradients, to the host.

    def down(self, chunk: int, slot: Tensor, source: Tensor) -> None:
        """Copy a flat tensor into a part of the chunk's slot; it is there once `copied` says so.

        The source must stay as it is until then, or the chunk has to be copied once more.
        """
        side = self._streams.get(source.device)
        if side is None:
            slot.copy_(source)
            return
        source = source.resolve_conj().resolve_neg()  # else torch turns the host's numbers, and too early
        side.wait_stream(self._cuda.current_stream(source.device))
        with self._cuda.stream(side):
            slot.copy_(source, non_blocking=True)
        self._copies.setdefault(chunk, []).append((self._mark(side), source))

    def copied(self, chunk: int, wait: bool = False) -> bool:
        """Whether all copies into the chunk's slot are done; True after a wait for them."""
        for event, _ in self._copies.get(chunk, ()):
            if wait:
                event.synchronize()
            elif not event.query():
                return False
        self._copies.pop(chunk, None)
        return True

    def once_copied(self, chunk: int, send: Callable[[], None]) -> None:
        """Call `send` when the chunk's copies are done and all before it is sent: now, or at a later look."""
        self._waiting.append((chunk, send))
        self.look()

    def between(self, hook: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        """A hook that first looks; one runs at a time, though backward has a thread for each GPU."""

        def looking(tensor: Tensor) -> None:
            with self._lock:
                self.look()
                hook(tensor)

        return looking

    def look(self, wait: bool = False) -> None:
        """Send what is copied by now, in the order in which it came; `wait` = all."""
        while self._waiting and self.copied(self._waiting[0][0], wait):
            self._waiting.popleft()[1]()

    # Values, to the GPUs.

    def up(self, target: Tensor, values: Tensor) -> None:
        """Copy values (shape of the target) into a tensor of the model, before all that the script does next.

        The memory that they lie in must stay as it is until `settle`.
        """
        side = self._streams.get(target.device)
        if side is None:
            target.copy_(values)
            return
        current = self._cuda.current_stream(target.device)
        side.wait_stream(current)  # somebody may still read the old ones
        with self._cuda.stream(side):
            target.copy_(values, non_blocking=True)
        current.wait_stream(side)
        self._lent.append((self._mark(side), values))

    def settle(self) -> None:
        """Wait until all values are in the model, so that the memory they came in may be written to."""
        for event, _ in self._lent:
            event.synchronize()
        self._lent.clear()

    def _mark(self, side: Any) -> Any:
        return side.record_event(self._cuda.Event(blocking=True))  # a wait leaves its core to the servers

    # The host's memory.

    def pin(self, region: Tensor) -> None:
        """Page-lock memory (uint8) that the kernel gave, without which its copies hold up their caller."""
        with self._cuda.device(self._first):  # else CUDA starts on the machine's first, another worker's
            if int(self._cuda.cudart().cudaHostRegister(region.data_ptr(), region.nbytes, 0)) == 0:
                self._pinned.append(region)
                return
            with suppress(RuntimeError):  # the next kernel would tell of the failure, once
                torch.ones(1, device=self._first)
        self._note("shared memory could not be page-locked for the GPU; copies do not run beside computing")

    def close(self) -> None:
        """Finish all copies and let go of the memory."""
        self.settle()
        for chunk in list(self._copies):
            self.copied(chunk, wait=True)
        with self._cuda.device(self._first):
            while self._pinned:
                self._cuda.cudart().cudaHostUnregister(self._pinned.pop().data_ptr())
