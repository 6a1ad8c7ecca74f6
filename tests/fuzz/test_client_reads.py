"""Arbitrary bytes as an answer: a client raises only documented errors."""

import contextlib

import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fuzz.messages import BYTES, FIRST, NUMBERS, U32, U64, mutated

from jurybox.client import Error
from jurybox.client.control import Control
from jurybox.client.link import RowsHere
from jurybox.client.remote.connection import Connection
from jurybox.client.remote.tcp import SentRows, TcpTransport
from jurybox.protocol import control_pb2 as pb
from jurybox.protocol import wire
from jurybox.protocol.spec import ModelSpec, TensorSpec

SPEC = ModelSpec("m", {"x": TensorSpec("float32", (4,))}, {"y": TensorSpec("float32", (4,)), "z": TensorSpec("uint8")})
REPLIES = st.one_of(
    st.builds(
        lambda code, text: pb.ControlReply(error=pb.ErrorMessage(code=code, message=text)), U32, st.text(max_size=20)
    ),
    st.builds(lambda number: pb.ControlReply(lease=pb.Lease(lease=number)), U64),
    st.builds(pb.ControlReply),
).map(lambda reply: reply.SerializeToString())


@pytest.fixture(scope="module")
def context():
    with zmq.Context() as context:
        yield context


@pytest.mark.parametrize("examples", [100, pytest.param(20_000, marks=pytest.mark.slow)])
def test_any_answer_on_the_control_transport(context, examples):
    control = Control(context, "inproc://nobody")

    @settings(max_examples=examples, deadline=None, database=None, derandomize=True)
    @given(st.one_of(st.tuples(FIRST, st.one_of(st.just(b"12345678"), NUMBERS), mutated(REPLIES)),
                     st.lists(BYTES, min_size=1, max_size=5)))  # fmt: skip
    def fuzz(frames):
        with contextlib.suppress(Error):
            control._read(list(frames), b"12345678")

    fuzz()
    control.close()


@pytest.mark.parametrize("examples", [100, pytest.param(20_000, marks=pytest.mark.slow)])
def test_any_answer_of_a_relay(context, examples):
    rows = RowsHere(SPEC, 4)
    connection = Connection.over_libzmq(context, "inproc://nobody", None)
    transport = TcpTransport(connection, rows, 1)
    head = st.builds(
        wire.PACK_REPLY.pack, st.one_of(st.just(5), U64), U64, st.one_of(st.just(1), U64), st.sampled_from([0, 1, 99])
    )
    first = st.one_of(mutated(head).map(lambda record: wire.PREFIX + record), FIRST)
    tensor = st.one_of(st.just(bytes(32)), st.just(bytes(2)), BYTES)

    @settings(max_examples=examples, deadline=None, database=None, derandomize=True)
    @given(st.tuples(first, st.lists(tensor, max_size=4)))
    def fuzz(message):
        transport._in_flight[5] = SentRows(1, 2, transport._connection.incarnation)
        with contextlib.suppress(Error):
            transport._read([zmq.Frame(frame) for frame in (message[0], *message[1])])
        assert not np.any(rows.columns.outputs["y"][[0, 3]])  # never beyond the ticket's rows

    fuzz()
    transport.close()
