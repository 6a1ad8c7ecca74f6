"""Messages that are none, or nearly: strategies for what comes in through ZeroMQ transports."""

from __future__ import annotations

from random import Random

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from jurybox.protocol import control_pb2 as pb
from jurybox.protocol import wire


def sending(examples: int, *, same: bool) -> settings:
    """Settings of a test that sends generated messages to a server.

    Args:
        same: every run sends the same messages, as the suite does; the long runs look further.
    """
    return settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],  # a failing batch is reported as it is: shrinking it takes minutes
        suppress_health_check=list(HealthCheck),
        derandomize=same,
    )


# Models whose rows differ in size, fail alone or have state (tests/open_models.py), with their input.
OPEN = {"text": "text", "image": "image", "mask": "image", "picky": "x", "sum": "x"}
NAMES = st.sampled_from(
    ["affine", "two", *OPEN, "nobody", "", "a" * 128, "a" * 129, "a" * 30_000, "../x", "affine\0", "ä"]
)
EDGES = st.sampled_from([0, 1, 2, 7, 2**31 - 1, 2**31, 2**32 - 1])
# Sizes of rows as text, session ids, steps: as they should be, nearly, and not at all.
EXTENTS = st.one_of(
    st.lists(
        st.lists(st.sampled_from(["0", "1", "2", "32", "33", "-1", "9999999999", "99999999999", "x", ""]), max_size=3),
        max_size=4,
    ).map(lambda rows: ";".join(",".join(row) for row in rows)),
    st.sampled_from(["1,1", "1,1;2,2", "0,0", ";" * 70_000, "," * 1000, "1,1" * 2000]),
    st.text(max_size=8),
)
STEPS = st.one_of(
    st.lists(
        st.tuples(st.sampled_from(["0", "1", "63", "4294967295", "-1"]), st.sampled_from(["0", "1", "2", "x", ""])),
        max_size=3,
    ).map(lambda rows: ";".join(":".join(row) for row in rows)),
    st.sampled_from(["0:0", "0:1", "1:0", "", ";" * 70_000]),
    st.text(max_size=8),
)
CLIENTS = st.sampled_from(["0" * 32, "f" * 32, "0" * 31, "G" * 32, ""])
SEQUENCES = st.one_of(st.integers(-2, 5), st.sampled_from([2**63 - 1, 2**64 - 1, "a", "", "x" * 128, "x" * 129, True]))
# Byte strings behind their lengths, and lengths that lie.
STRINGS = st.one_of(
    st.sampled_from([b"", b"\0\0\0\0", b"\3\0\0\0abc", b"\3\0\0\0abc\1\0\0\0z", b"\xff\xff\xff\xffab", b"\4\0\0\0abc"]),
    st.binary(max_size=12).map(lambda text: len(text).to_bytes(4, "little") + text),
)


U32 = st.one_of(EDGES, st.integers(0, 2**32 - 1))
U64 = st.one_of(EDGES, st.sampled_from([2**63, 2**64 - 1]), st.integers(0, 2**64 - 1))
I64 = st.one_of(EDGES, st.sampled_from([-1, -(2**63), 2**63 - 1]), st.integers(-(2**63), 2**63 - 1))
SETTINGS = st.one_of(
    st.text(max_size=40),
    st.sampled_from(["{}", "null", "[]", '{"factory": "x:y"}', '{"factory": 3}', '{"max_batch": -1}', "[" * 2000]),
)

REQUESTS = st.one_of(
    st.builds(lambda client, pid: pb.ControlRequest(hello=pb.Hello(client=client, pid=pid)), st.text(max_size=50), U32),
    st.builds(lambda model, rows: pb.ControlRequest(lease=pb.LeaseRequest(model=model, rows=rows)), NAMES, U32),
    st.builds(lambda lane, lease: pb.ControlRequest(release=pb.ReleaseRequest(lane=lane, lease=lease)), U32, U64),
    st.builds(lambda model: pb.ControlRequest(model=pb.ModelRequest(model=model)), NAMES),
    st.builds(
        lambda model, text: pb.ControlRequest(load=pb.LoadRequest(model=model, settings_json=text)),
        st.sampled_from(["nobody", "", "../x", "affine\0"]),  # models that are served stay as they are
        SETTINGS.filter(bool),
    ),
    st.builds(
        lambda model: pb.ControlRequest(unload=pb.UnloadRequest(model=model)), st.sampled_from(["nobody", "", "\0"])
    ),
    st.builds(lambda: pb.ControlRequest(status=pb.StatusRequest())),
    st.builds(pb.ControlRequest),
).map(lambda request: request.SerializeToString())


@st.composite
def mutated(draw, messages):
    """A message with some of its bytes changed, cut out or doubled."""
    content = bytearray(draw(messages))
    for _ in range(draw(st.integers(0, 4))):
        if not content:
            break
        at = draw(st.integers(0, len(content) - 1))
        match draw(st.integers(0, 2)):
            case 0:
                content[at] = draw(st.integers(0, 255))
            case 1:
                del content[at : at + draw(st.integers(1, 8))]
            case _:
                content[at:at] = content[at : at + draw(st.integers(1, 8))]
    return bytes(content)


_MOST_BENT = 4096  # bytes: large values are sent as generated, and not repeatedly


def bent(content: bytes, random: Random) -> bytes:
    """The same again with a few bytes changed, cut out, doubled or left off: a hundred times faster than `mutated`."""
    changed = bytearray(content[:_MOST_BENT])
    for _ in range(random.randrange(1, 4)):
        if not changed:
            return random.randbytes(random.randrange(20))
        at = random.randrange(len(changed))
        match random.randrange(8):
            case 0:
                del changed[at : at + random.randrange(1, 9)]
            case 1:
                changed[at:at] = changed[at : at + random.randrange(1, 9)]
            case 2:
                del changed[at:]
            case 3:
                changed[at] = random.choice((0, 1, 0x7F, 0x80, 0xFF))
            case 4:
                changed[at] ^= 1 << random.randrange(8)
            case _:
                changed[at] = random.randrange(256)
    return bytes(changed)


def bent_frames(frames: tuple[bytes, ...], random: Random) -> tuple[bytes, ...]:
    """A message with one of its frames bent, lost or doubled."""
    changed = list(frames)
    at = random.randrange(len(changed))
    match random.randrange(12):
        case 0 if len(changed) > 1:
            del changed[at]
        case 1:
            changed.insert(at, changed[at][:_MOST_BENT])
        case _:
            changed[at] = bent(changed[at], random)
    return tuple(frame if len(frame) <= _MOST_BENT else frame[:_MOST_BENT] for frame in changed)


BYTES = st.binary(max_size=120)
FIRST = st.one_of(st.just(wire.PREFIX), st.just(b"J\x63"), st.just(b""), BYTES)
NUMBERS = st.one_of(st.binary(min_size=8, max_size=8), BYTES)

CONTROL = st.one_of(
    st.tuples(st.just(wire.PREFIX), st.binary(min_size=8, max_size=8), mutated(REQUESTS)),
    st.tuples(FIRST, NUMBERS, mutated(REQUESTS)),
    st.lists(BYTES, min_size=1, max_size=6).map(tuple),
)


def tickets(lane, lease, first, incarnation):
    """Records near those that the holder of this lease could send."""
    near = st.builds(
        wire.PACK_TICKET.pack,
        U64,
        st.one_of(st.just(lease), U64),
        I64,
        I64,
        st.one_of(st.just(lane), U32),
        st.one_of(st.integers(max(0, first - 2), first + 40), U32),
        st.one_of(st.integers(0, 40), U32),
        U32,
        st.one_of(st.just(0), U64),
        st.one_of(st.just(incarnation), U64),
    )
    return st.one_of(near, mutated(near))


def engine_messages(lane, lease, first, incarnation):
    """For an engine's transport: a ticket, nearly a ticket, or no ticket at all."""
    record = tickets(lane, lease, first, incarnation)
    return st.one_of(
        record.map(lambda ticket: (wire.PREFIX + ticket,)),
        st.tuples(record.map(lambda ticket: wire.PREFIX + ticket), BYTES),
        st.lists(st.one_of(FIRST, BYTES), min_size=1, max_size=6).map(tuple),
    )


def large_requests():
    """Control requests around and beyond what the supervisor takes."""
    return st.builds(
        lambda size, kind: {
            "hello": pb.ControlRequest(hello=pb.Hello(client="x" * size)),
            "load": pb.ControlRequest(load=pb.LoadRequest(model="nobody", settings_json="x" * size)),
            "lease": pb.ControlRequest(lease=pb.LeaseRequest(model="x" * size)),
        }[kind].SerializeToString(),
        st.sampled_from([2**20 - 40, 2**20 - 8, 2**20, 2**20 + 1, 2**21]),
        st.sampled_from(["hello", "load", "lease"]),
    )


def inline_messages(lease):
    """For a relay's transport: tickets with the rows of model affine behind them, or nearly; control messages."""
    record = tickets(0, lease, 0, 1).map(lambda ticket: wire.PREFIX + ticket)
    tensor = st.one_of(st.integers(0, 40).map(lambda rows: bytes(16 * rows)), BYTES)
    return st.one_of(
        st.tuples(record, tensor),
        st.tuples(record, st.lists(tensor, max_size=4)).map(lambda parts: (parts[0], *parts[1])),
        *([CONTROL] * 6),
        st.tuples(st.just(wire.PREFIX), st.binary(min_size=8, max_size=8), large_requests()),
    )
