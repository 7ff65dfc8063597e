"""A file of tensors that is mapped into memory: what `penstock weights pack` writes.

    magic, version, place and length of the table, file's length, xxh3-128 of all this and the table     64 bytes
    tensors, each from a multiple of 4096 on, large ones of 2 MiB
    table: JSON, with every tensor's dtype, shape, offset, length and xxh3-128, and what the writer says of the model

A file is written under a temporary name, synchronised and renamed, so under its own name it is whole. The table is
checked whenever it is read. `check_content` reads all of the file and compares every tensor with its hash.
"""

import json
import mmap
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from penstock.engine.weights.files import PACKED_MAGIC as _MAGIC
from penstock.engine.weights.files import PACKED_PRELUDE as _PRELUDE
from penstock.engine.weights.files import Progress
from penstock.errors import ModelLoadError

FORMAT_VERSION = 1
_LARGE_BYTES = 2 * 2**20
_PAGE_BYTES = 4096
_HASH_BYTES = 8 * 2**20
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.int8, torch.int16, torch.int32,
        torch.int64, torch.bool,
    )
}  # fmt: skip


class PackedFileRefused(ModelLoadError):
    """A packed file that is damaged, or is not of what was asked for."""


class PackedFileWriter:
    """Writes tensors one after the other. As a context: the file appears at its end, and not at all after an error."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._scratch = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
        self._table: dict[str, list[Any]] = {}
        self._places: dict[tuple[int, int, torch.dtype, tuple[int, ...]], str] = {}
        self._kept: list[Tensor] = []  # so that no other tensor gets one's address
        self._end = _PRELUDE.size

    def __enter__(self) -> "PackedFileWriter":
        self._out = self._scratch.open("wb")
        return self

    def add_tensor(self, name: str, tensor: Tensor) -> str:
        """Write a tensor, and return the name under which it is in the file: that of an earlier one in its memory."""
        tensor = tensor.detach().contiguous()
        place = (tensor.data_ptr(), tensor.nbytes, tensor.dtype, tuple(tensor.shape))
        if tensor.nbytes and place in self._places:
            return self._places[place]
        self._places[place] = name
        self._kept.append(tensor)
        content = memoryview(tensor.reshape(-1).view(torch.uint8).numpy()) if tensor.nbytes else memoryview(b"")  # type: ignore[arg-type, unused-ignore]
        align = _LARGE_BYTES if len(content) >= _LARGE_BYTES else _PAGE_BYTES
        offset = -(-self._end // align) * align
        self._out.seek(offset)
        self._out.write(content)
        self._end = offset + len(content)
        kind, digest = str(tensor.dtype).removeprefix("torch."), xxhash.xxh3_128_hexdigest(content)
        self._table[name] = [kind, list(tensor.shape), offset, len(content), digest]
        return name

    def finish_file(self, about: dict[str, Any]) -> None:
        """Write the table, with what else there is to say, and give the file its name."""
        table = json.dumps({"about": about, "tensors": self._table}).encode()
        self._out.seek(self._end)
        self._out.write(table)
        # Kernels may load the rest of a cache line behind a tensor: there is always a table behind it.
        length = self._end + len(table)
        fields = (_MAGIC, FORMAT_VERSION, 0, self._end, len(table), length)
        digest = xxhash.xxh3_128_digest(_PRELUDE.pack(*fields, bytes(16)) + table)
        self._out.seek(0)
        self._out.write(_PRELUDE.pack(*fields, digest))
        self._out.close()
        _give_name(self._scratch, self._path)

    def __exit__(self, *raised: object) -> None:
        self._out.close()
        self._scratch.unlink(missing_ok=True)


@dataclass(frozen=True)
class PackedFile:
    """A packed file whose table was checked."""

    path: Path
    num_bytes: int
    digest: str
    """The hash of its table, which has the hashes of all tensors: it names the content."""
    about: dict[str, Any]
    _table: dict[str, list[Any]]
    _inode: tuple[int, int]

    def map_tensors(self) -> dict[str, Tensor]:
        """Return all tensors, in read-only memory that all processes share. Nothing is read before it is used.

        Raises `PackedFileRefused` where the file was cut off since it was opened.
        """
        whole = self._map_bytes()
        return {
            name: whole[offset : offset + length].view(_DTYPES[kind]).view(shape) if length else
            torch.empty(shape, dtype=_DTYPES[kind])
            for name, (kind, shape, offset, length, _) in self._table.items()
        }  # fmt: skip

    def check_content(self, report: Progress) -> None:
        """Read all of the file. Raises `PackedFileRefused` with the name of a tensor that is not what was written."""
        whole, done = self._map_bytes().numpy(), 0
        for name, (_, _, offset, length, digest) in self._table.items():
            found = xxhash.xxh3_128()
            for first in range(offset, offset + length, _HASH_BYTES):
                found.update(whole[first : min(first + _HASH_BYTES, offset + length)])  # type: ignore[arg-type, unused-ignore]
            if found.hexdigest() != digest:
                raise PackedFileRefused(f"{self.path} is damaged: {name} is not what was written")
            done += length
            report("checking packed weights", min(1.0, done / max(1, self.num_bytes)))
        report("checking packed weights", 1.0)

    def _map_bytes(self) -> Tensor:
        with self.path.open("rb") as content:
            stat = os.fstat(content.fileno())
            if stat.st_size != self.num_bytes or (stat.st_dev, stat.st_ino) != self._inode:
                raise PackedFileRefused(f"{self.path} has changed since it was opened")
            memory = mmap.mmap(content.fileno(), self.num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch has no tensors that say that they are read-only
            return torch.frombuffer(memory, dtype=torch.uint8)


def _give_name(scratch: Path, path: Path) -> None:
    """Give a file that was written its name, so that both are there after a crash of the machine."""
    with scratch.open("rb") as content:
        os.fsync(content.fileno())
    scratch.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def accept_packed_file(received: Path, path: Path, digest: str, report: Progress) -> PackedFile:
    """Read all of a file that was received from elsewhere, give it its name if it is the one with this digest, and
    return it. Raises `PackedFileRefused`.
    """
    file = open_packed_file(received)
    if file.digest != digest:
        raise PackedFileRefused(f"{received} has the digest {file.digest}, and {digest} was asked for")
    file.check_content(report)
    _give_name(received, path)
    return open_packed_file(path)


def open_packed_file(path: Path) -> PackedFile:
    """Read and check the table. Raises `PackedFileRefused` for a file that is damaged or of another version."""
    try:
        with path.open("rb") as content:
            stat, start = os.fstat(content.fileno()), content.read(_PRELUDE.size)
            size = stat.st_size
            if len(start) < _PRELUDE.size or start[:8] != _MAGIC:
                raise PackedFileRefused(f"{path} is no file of packed weights")
            _, version, _, offset, length, whole, digest = _PRELUDE.unpack(start)
            if version != FORMAT_VERSION:
                raise PackedFileRefused(f"{path} has version {version}, and this Penstock reads {FORMAT_VERSION}")
            if size != whole:
                raise PackedFileRefused(f"{path} is cut off: it has {size:,} bytes of {whole:,}")
            if offset + length != whole:
                raise PackedFileRefused(f"{path} is damaged: its table is not at its end")
            content.seek(offset)
            table = content.read(length)
    except OSError as error:
        raise PackedFileRefused(f"{path} cannot be read: {error.strerror or error}") from error
    fields = (_MAGIC, version, 0, offset, length, whole)
    if xxhash.xxh3_128_digest(_PRELUDE.pack(*fields, bytes(16)) + table) != digest:
        raise PackedFileRefused(f"{path} is damaged: its table is not what was written")
    found = json.loads(table)
    return PackedFile(path, size, digest.hex(), found["about"], found["tensors"], (stat.st_dev, stat.st_ino))
