"""Removes GPU code from a shared library, all but what one architecture runs.

Such a library has containers, each with the same functions compiled for several architectures. A container keeps its
place and its size, with zeros where its other entries were, so the file is valid and compresses to a fraction.
"""

import struct
from collections.abc import Iterator
from typing import NamedTuple

_SECTIONS = (b".nv_fatbin", b"__nv_relfatbin")
_MAGIC = 0xBA55ED50
_PTX, _MACHINE_CODE = 1, 2


class Entry(NamedTuple):
    """The code for one architecture in a container."""

    kind: int
    architecture: int
    """90 for sm_90 and for sm_90a."""
    content: bytes
    """With its header."""


def prune_library(library: bytes, architecture: int) -> bytes:
    """Return the library with the code that a GPU of this architecture runs: machine code for it or, in a container
    without, for the newest older one of its generation; else the newest PTX that can be compiled for it.
    """
    pruned = bytearray(library)
    for start, end in _find_sections(library):
        for at, header_bytes, entries in _read_containers(library, start, end):
            kept = b"".join(one.content for one in _choose_entries(entries, architecture))
            num_bytes = sum(len(one.content) for one in entries)
            struct.pack_into("<Q", pruned, at + 8, len(kept))
            pruned[at + header_bytes : at + header_bytes + num_bytes] = kept.ljust(num_bytes, b"\0")
    return bytes(pruned)


def _choose_entries(entries: list[Entry], architecture: int) -> list[Entry]:
    usable = [one for one in entries if one.architecture <= architecture]
    compiled = [one for one in usable if one.kind == _MACHINE_CODE and one.architecture // 10 == architecture // 10]
    found = compiled or [one for one in usable if one.kind == _PTX]
    newest = max((one.architecture for one in found), default=0)
    return [one for one in found if one.architecture == newest]


def _find_sections(library: bytes) -> Iterator[tuple[int, int]]:
    """Yield where each section of an ELF file begins and ends that has GPU code."""
    (table,) = struct.unpack_from("<Q", library, 0x28)
    entry_bytes, num_sections, names_index = struct.unpack_from("<HHH", library, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", library, table + entry_bytes * number) for number in range(num_sections)]
    names = headers[names_index][4]
    for name, _, _, _, start, size in headers:
        if library[names + name : library.index(b"\0", names + name)] in _SECTIONS:
            yield start, start + size


def _read_containers(library: bytes, start: int, end: int) -> Iterator[tuple[int, int, list[Entry]]]:
    """Yield the place of each container, the bytes of its header, and its entries."""
    at = start
    while at + 16 <= end:
        magic, _, header_bytes, num_bytes = struct.unpack_from("<IHHQ", library, at)
        if magic != _MAGIC:
            at += 8  # between containers there is padding
            continue
        place, stop, entries = at + header_bytes, at + header_bytes + num_bytes, list[Entry]()
        while place < stop:
            kind, _, entry_header_bytes, content_bytes = struct.unpack_from("<HHIQ", library, place)
            (architecture,) = struct.unpack_from("<I", library, place + 28)
            after = place + entry_header_bytes + content_bytes
            if after > stop:
                raise ValueError(f"GPU code in a form that is not known here, at byte {place}")
            entries.append(Entry(kind, architecture, library[place:after]))
            place = after
        yield at, header_bytes, entries
        at = stop
