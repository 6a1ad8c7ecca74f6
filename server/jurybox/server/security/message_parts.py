"""How many parts a protobuf message has, counted before it is parsed: each may take a hundred bytes in memory."""

from __future__ import annotations

from google.protobuf.descriptor import Descriptor

FEW_BYTES = 64 << 10  # a message up to this size is harmless, whatever its parts
MOST_PARTS = 1 << 16  # of a message: every tensor, parameter and unpacked number counts


def has_many_parts(data: bytes, kind: Descriptor) -> bool:
    """Return whether a message has too many parts, each of which may take two bytes in it but a hundred in memory."""
    parts = 0
    inside = [(0, len(data), kind)]
    try:
        while inside:
            at, end, of = inside.pop()
            while at < end:
                parts += 1
                if parts > MOST_PARTS:
                    return True
                tag, at = _varint(data, at)
                match tag & 7:
                    case 0:
                        _, at = _varint(data, at)
                    case 1:
                        at += 8
                    case 5:
                        at += 4
                    case 2:
                        size, at = _varint(data, at)
                        field = of.fields_by_number.get(tag >> 3)
                        if field is not None and field.message_type is not None:
                            inside.append((at, at + size, field.message_type))
                        at += size
                    case _:
                        return False  # invalid: the parser reports it
    except IndexError:
        pass  # truncated: the parser reports that too
    return False


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Decode a varint; return it and the next position (protobuf.dev/programming-guides/encoding)."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128 or shift > 63:
            return value, at
        shift += 7
