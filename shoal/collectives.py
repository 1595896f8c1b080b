"""Small values between the workers of a group: gather, mean, barrier, and torch's own process group."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch import distributed as dist

from shoal.errors import PeerFailed, UsageError, WaitTimeout
from shoal.parameters import as_bytes, dtype_name, from_bytes
from shoal.site import Membership, OneProcess, Site, wait_for
from shoal.topology import Member

CALLS = "gather, mean, barrier or a SyncBatchNorm's forward"


class Collectives:
    """What the workers of one group tell each other; all make the same calls in the same order."""

    def __init__(self, membership: Membership, site: Site) -> None:
        self._m, self._site = membership, site
        self._rank, self.size = membership.member.index, membership.topology.workers_per_group
        self._store: dist.Store | None = None
        self._calls = 0

    def gather(self, value: Any) -> list[Any]:
        """Every worker's value, in the order of ranks; numbers, text, lists, dicts, or a tensor each."""
        return [_unpacked(content) for content in self._exchange(_packed(value))]

    def mean(self, value: Any) -> Any:
        """The mean of every worker's number (a float) or tensor (its shape and dtype)."""
        values = self.gather(value)
        if isinstance(value, Tensor):
            total = torch.stack([v.to(torch.promote_types(v.dtype, torch.float32)) for v in values]).mean(0)
            return total.to(value.dtype if value.is_floating_point() else total.dtype).to(value.device)
        return sum(float(v) for v in values) / len(values)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """torch's default process group, over this group's workers; made at its first use."""
        if isinstance(self._site, OneProcess) and self.size > 1:
            raise UsageError(
                "workers that are threads have no process group of torch's",
                remedy="use run.mean and run.gather, or run the script with shoal run",
            )
        if not dist.is_initialized():
            store = dist.PrefixStore(f"gloo/{self._m.member.group}/{self._m.incarnation}", self._meeting())
            dist.init_process_group(
                **self._backend(store),
                store=store,
                rank=self._rank,
                world_size=self.size,
                timeout=timedelta(seconds=self._m.config.timeouts.values),
            )
        group = dist.group.WORLD
        assert group is not None
        return group

    def _backend(self, store: dist.Store) -> dict[str, Any]:
        """Gloo; beside it NCCL for tensors on GPUs, which refuses workers that share one."""
        gpu = self._m.device
        own = gpu.type == "cuda" and dist.is_nccl_available()
        name = str(torch.cuda.get_device_properties(gpu).uuid) if own else "none"  # the same on all machines
        store.set(f"gpu/{self._rank}", name)
        if not own:
            return {"backend": "gloo"}
        found = set()
        for rank in range(self.size):
            what = f"{Member('worker', self._m.member.group, rank)}, which has not called {CALLS}"
            found.add(wait_for(store, f"gpu/{rank}", self._m, "values", what, self._site.check).decode())
        if len(found) < self.size or "none" in found:
            return {"backend": "gloo"}
        return {"backend": "cpu:gloo,cuda:nccl", "device_id": gpu}

    def _meeting(self) -> dist.Store:
        self._store = self._store or self._site.store()
        return self._store

    def _exchange(self, content: bytes) -> list[bytes]:
        """Every worker's bytes, in the order of ranks."""
        if self.size == 1:
            return [content]
        if self._site.gloo:
            return self._exchange_by_gloo(content)
        self._calls += 1
        keys = [f"gather/{self._m.member.group}/{self._calls}/{rank}" for rank in range(self.size)]
        store = self._meeting()
        store.set(keys[self._rank], content.hex())
        found = []
        for rank, key in enumerate(keys):
            what = f"{Member('worker', self._m.member.group, rank)}, which has not called {CALLS}"
            found.append(wait_for(store, key, self._m, "values", what, self._site.check))
        return [bytes.fromhex(content.decode()) for content in found]

    def _exchange_by_gloo(self, content: bytes) -> list[bytes]:
        try:
            return self._gathered(self.process_group, content)
        except RuntimeError as error:  # Gloo's own names neither the wait nor its timeout
            others = f"the other workers of group {self._m.member.group}"
            if not re.search("timed out|timeout", str(error), re.IGNORECASE):
                what = f"{others} cannot be reached any more ({error})"
                raise PeerFailed(what, member=self._m.member.name, remedy="see their logs") from error
            raise WaitTimeout(
                f"waited {self._m.config.timeouts.values:g} s (timeouts.values) for {others} to call {CALLS}",
                member=self._m.member.name,
                remedy="let all make the same calls, in one order; raise timeouts.values if they are slow",
            ) from error

    def _gathered(self, group: dist.ProcessGroup, content: bytes) -> list[bytes]:
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(content)]), group=group)
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        found = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(found, padded, group=group)
        return [bytes(as_bytes(part[: int(size)])) for part, size in zip(found, sizes, strict=True)]


def _packed(value: Any) -> bytes:
    if isinstance(value, Tensor):
        plain = value.detach().cpu().contiguous()
        return msgspec.msgpack.encode((dtype_name(value.dtype), list(value.shape), bytes(as_bytes(plain))))
    try:
        return msgspec.msgpack.encode(("", value))
    except TypeError as error:
        raise UsageError(
            f"this value cannot be sent to other workers ({error})",
            remedy="gather tensors, numbers, text, lists or dicts of them",
        ) from None


def _unpacked(content: bytes) -> Any:
    kind, *rest = msgspec.msgpack.decode(content)
    if not kind:
        return rest[0]
    shape, raw = rest
    return from_bytes(raw, kind).view(shape)
