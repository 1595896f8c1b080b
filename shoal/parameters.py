"""A model as the plan sees it: names, flat bytes, slots."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shoal.errors import ProtocolError, UsageError
from shoal.partition import ITEMSIZE, Buffer, Chunk, Parameter, Plan
from shoal.rows import Content, Rows, no_rows, numbers_of, refuse_max_norm, rows_of, tables_of
from shoal.wire import Frame


def dtype_name(dtype: torch.dtype) -> str:
    """torch.float32 → "float32"."""
    return str(dtype).removeprefix("torch.")


def as_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def from_bytes(frame: Frame, dtype: str) -> Tensor:
    """A flat tensor over a received frame, without a copy."""
    kind: torch.dtype = getattr(torch, dtype)
    if memoryview(frame).nbytes == 0:
        return torch.empty(0, dtype=kind)
    if isinstance(frame, bytes):
        frame = bytearray(frame)  # torch refuses to wrap memory that must not be written to
    return torch.frombuffer(frame, dtype=kind)


def checked(frames: Sequence[Frame], chunk: Chunk, sender: str) -> Tensor:
    """The one raw frame of a message about a chunk, its size checked against the plan."""
    sizes = [memoryview(frame).nbytes for frame in frames]
    if sizes != [chunk.nbytes]:
        raise ProtocolError(
            f"{sender} sent frames of {sizes} bytes for chunk {chunk.number}, not {chunk.nbytes}"
        )
    return from_bytes(frames[0], chunk.dtype)


def frames_of(content: Content) -> list[Frame]:
    """The raw frames of what travels of a chunk; of rows their numbers first."""
    if isinstance(content, Rows):
        return [as_bytes(content.index), as_bytes(content.values)]
    return [as_bytes(content)]


def codec_of(content: Content | None) -> str:
    """What the header says of those frames."""
    return "rows" if isinstance(content, Rows) else "raw"


def received(frames: Sequence[Frame], codec: str, chunk: Chunk, sender: str) -> Content:
    """What `frames_of` made, checked against the plan; raises ProtocolError for anything else."""
    if codec != "rows":
        return checked(frames, chunk, sender)
    sizes = [memoryview(frame).nbytes for frame in frames]
    count = sizes[0] // 8 if sizes else 0
    if not chunk.row or sizes != [count * 8, count * chunk.row * ITEMSIZE[chunk.dtype]]:
        raise ProtocolError(
            f"{sender} sent frames of {sizes} bytes as rows of chunk {chunk.number}, "
            f"which has rows of {chunk.row} elements"
        )
    index, values = from_bytes(frames[0], "int64"), from_bytes(frames[1], chunk.dtype)
    if count and (index[0] < 0 or index[-1] >= chunk.rows or bool((index.diff() <= 0).any())):
        raise ProtocolError(
            f"{sender} sent rows of chunk {chunk.number}, which has {chunk.rows}, whose numbers do not ascend"
        )
    return Rows(index, values.view(count, chunk.row))


def fingerprint(tensor: Tensor) -> int:
    """A checksum of a tensor's bytes (CRC-32)."""
    return zlib.crc32(as_bytes(tensor.detach().contiguous().cpu()))


class BufferAt(NamedTuple):
    """Where a buffer lives; looked up anew each time, because modules may replace the tensor.

    A parameter that no optimizer trains (frozen, or a teacher that the script moves) is one as well.
    """

    module: nn.Module
    key: str

    @property
    def tensor(self) -> Tensor:
        """The buffer as it is now."""
        return getattr(self.module, self.key)  # type: ignore[no-any-return]


WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")
"""Modules of torch that exchange gradients or parameters themselves."""


def refuse_wrappers(models: Sequence[nn.Module]) -> None:
    """Raise UsageError for a model that torch's own data parallelism has taken over, in whole or in part."""
    for module in (module for model in models for module in model.modules()):
        for cls in type(module).__mro__:
            if cls.__name__ in WRAPPERS and cls.__module__.startswith("torch."):
                raise UsageError(
                    f"the model contains a {cls.__name__}, which would exchange gradients a second time",
                    remedy="Shoal takes the plain model: "
                    + ("leave out fully_shard" if cls.__name__ == "FSDPModule" else "pass model.module"),
                )


class Described(NamedTuple):
    """Models and optimizers as the plan's input, beside the tensors it is about."""

    parameters: tuple[Parameter, ...]
    tensors: tuple[Tensor, ...]
    buffers: tuple[Buffer, ...]
    places: tuple[BufferAt, ...]


def plain_name(name: str) -> str:
    """A parameter's name without what torch.compile puts into it."""
    return name.replace("_orig_mod.", "")


def named_models(models: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Each model with the prefix of its names: none for a single model, "0.", "1.", … for several."""
    for position, model in enumerate(models):
        yield (f"{position}." if len(models) > 1 else ""), model


def describe(
    models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], whole: Sequence[bool]
) -> Described:
    """List what the optimizers train and the models carry along, in the order of the models.

    Args:
        whole: for each optimizer, whether it must see whole parameters.

    Raises:
        UsageError: for a parameter in two optimizers, an uninitialised one, or none at all.
        ParameterEdited: for a lookup with max_norm.
    """
    owners, tables = _owners(optimizers), tables_of(models)
    refuse_max_norm(models, tuple(owners))
    names: dict[Tensor, str] = {}
    for prefix, model in named_models(models):
        for name, parameter in model.named_parameters():
            names.setdefault(parameter, prefix + plain_name(name))
            if nn.parameter.is_lazy(parameter):
                raise UsageError(
                    f"{names[parameter]} has no shape yet",
                    remedy="run one forward pass before prepare() to materialise it",
                )
    ordered = [t for t in names if t in owners] + [t for t in owners if t not in names]
    if not any(t.requires_grad and t.numel() for t in ordered):
        raise UsageError(
            "the optimizers have no parameter to train",
            remedy="prepare the optimizer that holds the model's parameters, and let them require gradients",
        )
    for count, tensor in enumerate(owners):
        if tensor not in names:
            names[tensor] = f"optimizer.{count}"
    parameters = []
    for tensor in ordered:
        optimizer, settings = owners[tensor]
        shape, dtype = tuple(tensor.shape), dtype_name(tensor.dtype)
        kind = whole[optimizer], tables.get(tensor, 0)
        parameters.append(Parameter(names[tensor], shape, dtype, optimizer, settings, *kind))
    buffers, places = _buffers(models, owners)
    return Described(tuple(parameters), tuple(ordered), buffers, places)


def _owners(optimizers: Sequence[torch.optim.Optimizer]) -> dict[Tensor, tuple[int, int]]:
    """Parameter → (optimizer, param group)."""
    owners: dict[Tensor, tuple[int, int]] = {}
    for number, optimizer in enumerate(optimizers):
        for settings, group in enumerate(optimizer.param_groups):
            for tensor in group["params"]:
                if owners.setdefault(tensor, (number, settings))[0] != number:
                    raise UsageError(
                        f"a parameter of shape {tuple(tensor.shape)} is in two optimizers",
                        remedy="give each parameter to one optimizer",
                    )
    return owners


def _buffers(
    models: Sequence[nn.Module], owners: dict[Tensor, tuple[int, int]]
) -> tuple[tuple[Buffer, ...], tuple[BufferAt, ...]]:
    """Every buffer once; it travels with the optimizer of its model's first parameter."""
    buffers, places, seen = [], [], set()
    for prefix, model in named_models(models):
        optimizer = next((owners[p][0] for p in model.parameters() if p in owners), 0)
        for path, module in model.named_modules():
            for key, buffer in (*module._buffers.items(), *module._parameters.items()):
                if buffer is None or buffer in seen or buffer in owners:
                    continue
                seen.add(buffer)
                name = prefix + plain_name(f"{path}.{key}" if path else key)
                buffers.append(Buffer(name, tuple(buffer.shape), dtype_name(buffer.dtype), optimizer))
                places.append(BufferAt(module, key))
    return tuple(buffers), tuple(places)


class Replica:
    """A worker's copy of the model, and one slot per chunk.

    A slot takes a chunk's gradient from the hook, the only copy there; then it belongs to the wire until the
    chunk's new values arrive. A table's takes no room: it is replaced by the rows of each gradient.
    """

    def __init__(self, plan: Plan, tensors: Sequence[Tensor], places: Sequence[BufferAt]) -> None:
        self.plan = plan
        self.tensors = tuple(tensors)
        self.places = tuple(places)
        self.slots = [_slot(chunk) for chunk in plan.chunks]

    def piece(self, chunk: Chunk, index: int) -> Tensor:
        """The slot's part for one piece of the chunk, flat; of a table's, the rows it holds."""
        piece, slot = chunk.pieces[index], self.slots[chunk.number]
        if isinstance(slot, Rows):
            return slot.values
        return slot[piece.at : piece.at + piece.stop - piece.start]

    def fill(self, chunk: Chunk, index: int, gradient: Tensor | None) -> None:
        """Copy a gradient (shape of the parameter) into the slot; None fills with zeros."""
        piece = chunk.pieces[index]
        if chunk.row and gradient is not None:
            self.slots[chunk.number] = rows_of(gradient, piece)
            return
        slot = self.piece(chunk, index)
        if gradient is None:
            slot.zero_()
        else:
            slot.copy_(gradient.detach().reshape(-1)[piece.start : piece.stop])

    def fill_buffer(self, chunk: Chunk) -> None:
        """Copy a buffer as it is now into its slot."""
        assert chunk.buffer is not None
        numbers_of(self.slots[chunk.number]).copy_(self.places[chunk.buffer].tensor.detach().reshape(-1))

    def holds(self, chunk: Chunk, index: int, gradient: Tensor) -> bool:
        """Whether the slot has every bit of a gradient."""
        piece, slot = chunk.pieces[index], self.slots[chunk.number]
        if gradient.is_sparse is not isinstance(slot, Rows):
            return False
        if isinstance(slot, Rows):
            rows = rows_of(gradient, piece)
            return torch.equal(rows.index, slot.index) and _same_bytes(rows.values, slot.values)
        return _same_bytes(gradient.reshape(-1)[piece.start : piece.stop], self.piece(chunk, index))

    def read(self, chunk: Chunk) -> Tensor:
        """The chunk's present values in this copy, flat, on the CPU."""
        if chunk.buffer is not None:
            return self.places[chunk.buffer].tensor.detach().reshape(-1).cpu().clone()
        return torch.cat(
            [self.tensors[p.parameter].detach().reshape(-1)[p.start : p.stop].cpu() for p in chunk.pieces]
        )

    @torch.no_grad()
    def install(self, chunk: Chunk, values: Content, into: Mapping[Tensor, Tensor] | None = None) -> None:
        """Write a chunk's values into the model, or into other tensors given for the model's."""
        if isinstance(values, Rows):
            (piece,) = chunk.pieces
            tensor = self.tensors[piece.parameter]
            index = (values.index + piece.start // chunk.row).to(tensor.device)
            (into[tensor] if into else tensor).index_copy_(0, index, values.values.to(tensor.device))
            return
        if chunk.buffer is not None:
            target = self.places[chunk.buffer].tensor
            target = into[target] if into else target
            target.copy_(values.view(target.shape))
            return
        for piece in chunk.pieces:
            tensor = self.tensors[piece.parameter]
            tensor = into[tensor] if into else tensor
            part = values[piece.at : piece.at + piece.stop - piece.start]
            if piece.stop - piece.start == tensor.numel():
                tensor.copy_(part.view(tensor.shape))
            elif tensor.is_contiguous():
                tensor.view(-1)[piece.start : piece.stop].copy_(part)
            else:  # a strided parameter has no flat view to write through
                flat = tensor.reshape(-1)
                flat[piece.start : piece.stop] = part.to(flat.device)
                tensor.copy_(flat.view(tensor.shape))

    def build(self, values: Mapping[int, Content]) -> dict[Tensor, Tensor]:
        """Copies of the model's tensors that hold other values (chunk → flat); the model stays as it is."""
        ours = [*self.tensors, *(place.tensor for place in self.places)]
        copies = {tensor: tensor.detach().clone() for tensor in ours}
        for number, flat in values.items():
            self.install(self.plan.chunks[number], flat, copies)
        return copies

    def snapshot(self) -> dict[int, Tensor]:
        """A copy of all chunks' values, to be installed again later."""
        return {chunk.number: self.read(chunk) for chunk in self.plan.chunks}

    def checksum(self) -> int:
        """A checksum of all values, to compare two workers' starts."""
        value = 0
        for chunk in self.plan.chunks:
            value = zlib.crc32(as_bytes(self.read(chunk)), value)
        return value


def _slot(chunk: Chunk) -> Content:
    dtype: torch.dtype = getattr(torch, chunk.dtype)
    return no_rows(chunk.row, dtype) if chunk.row else torch.zeros(chunk.size, dtype=dtype)


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    a, b = a.detach().contiguous().cpu(), b.contiguous()
    return bool(torch.equal(a.view(torch.uint8), b.view(torch.uint8)))


def pieces_of(chunks: Iterable[Chunk], parameters: int) -> list[list[tuple[Chunk, int]]]:
    """For each parameter, the chunks it lies in, with the index of its piece there."""
    found: list[list[tuple[Chunk, int]]] = [[] for _ in range(parameters)]
    for chunk in chunks:
        for index, piece in enumerate(chunk.pieces):
            found[piece.parameter].append((chunk, index))
    return found
