"""Which heads of requests a port keeps, whose bodies it answers itself, and how it writes refusals."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from jurybox.protocol.errors import Busy, Code, Refused, SpecMismatch
from jurybox.server.gateway.known_paths import (
    FIELDS,
    MOST_BODY,
    MOST_HEAD,
    MOST_HEADS,
    KnownPathConnection,
    KnownPaths,
    refused,
    to_json,
)
from jurybox.server.security.doors import Doors
from jurybox.server.security.http import DATA_ONLY

HEAD = b"POST /x HTTP/1.1\r\nContent-Length: 10\r\nHost: here\r\n\r\n"


def scope(length=10, *more, version="1.1"):
    return {"headers": [(b"content-length", b"%d" % length), *more], "http_version": version, "path": "/x"}


def with_length(length, head=HEAD):
    return head.replace(b" 10\r", b" %d\r" % length)


@pytest.mark.parametrize(
    ("head", "of_scope", "kept"),
    [
        (HEAD, scope(), True),
        (HEAD.replace(b"Content-Length", b"content-length"), scope(), True),
        (HEAD, scope(11), False),
        (HEAD, scope(10, (b"expect", b"100-continue")), False),
        (HEAD, scope(version="1.0"), False),
        (b"POST /x HTTP/1.1\r\nHost: here\r\n\r\n", scope(), False),
        (HEAD.replace(b"here", b"h" * (MOST_HEAD - len(HEAD) + 4)), scope(), True),
        (HEAD.replace(b"here", b"h" * (MOST_HEAD - len(HEAD) + 5)), scope(), False),
    ],
)
def test_a_plain_head_is_kept_whatever_length_its_body_has(head, of_scope, kept):
    paths, taken = KnownPaths(1 << 30), object()
    paths.learn(head, of_scope, answer := object())
    assert len(paths.heads) == kept
    for length in (10, 0, 12345):
        pending = paths.of(with_length(length, head.replace(b"content", b"Content", 1)), taken)
        if b"content" in head or not kept:
            assert pending is None, "another head"
        else:
            assert pending.length == length and pending.path.answer is answer and pending.taken is taken
            assert pending.path.fields == FIELDS and pending.path.refuse is None and pending.parts == []


@pytest.mark.parametrize(("most", "length", "known"), [(100, 100, True), (100, 101, False), (1 << 30, MOST_BODY, True),
                                                       (1 << 30, MOST_BODY + 1, False)])  # fmt: skip
def test_a_body_that_is_too_large_goes_the_usual_way(most, length, known):
    paths = KnownPaths(most)
    paths.learn(HEAD, scope(), object())
    assert (paths.of(with_length(length), None) is not None) == known
    assert paths.of(b"POST /x HTTP/1.1\r\n\r\n", None) is None


def test_only_so_many_heads_are_kept_and_each_has_the_refusals_and_fields_of_its_path():
    paths = KnownPaths(100, {"/x": "as its clients"})
    for number in range(MOST_HEADS):
        paths.learn(HEAD.replace(b"here", b"h%d" % number), scope(), object())
    assert len(paths.heads) == MOST_HEADS
    paths.learn(HEAD, {**scope(), DATA_ONLY: True}, object())
    assert len(paths.heads) == 1
    path = paths.of(HEAD, None).path
    assert path.refuse == "as its clients" and path.fields != FIELDS and path.fields.endswith(b"\r\n\r\n")
    assert b"cache-control: no-store\r\n" in path.fields


def test_json_carries_every_text_and_no_number_that_is_none():
    assert to_json({"a": "ä\ud800", "b": [1, None]}) == '{"a":"ä\\ud800","b":[1,null]}'.encode()
    for number in (float("nan"), float("inf")):
        with pytest.raises(ValueError):
            to_json([number])


@pytest.mark.parametrize(
    ("error", "status", "again"),
    [
        (Busy("not now"), 429, True),
        (Refused("the doors have closed", Code.DRAINING), 503, True),
        (SpecMismatch("no such input"), 422, False),
    ],
)
def test_a_refusal_says_when_to_ask_again(error, status, again):
    reply = refused(error)
    assert reply.status == status and json.loads(reply.body) == {"error": str(error), "code": error.code.name}
    assert [name for name, _ in reply.headers] == ["retry-after"] * again
    assert dict(reply.fields())["content-length"] == str(len(reply.body))
    reply = reply._replace(version=3)
    assert ("x-jurybox-weights-version", "3") in reply.fields()


@pytest.mark.parametrize(
    ("changed", "closed", "idle"),
    [
        ({}, False, True),
        ({"limit_concurrency": None}, False, True),
        ({"limit_concurrency": 3}, False, True),
        ({"limit_concurrency": 2}, False, False),
        ({"between": False}, False, False),
        ({"_leaving": True}, False, False),
        ({}, True, False),
    ],
)
def test_a_connection_answers_itself_only_while_it_is_idle_and_there_is_room(changed, closed, idle):
    doors = Doors()
    if closed:
        doors.close()
    one = {"limit_concurrency": 50, "between": True, "_leaving": False, "doors": doors, "connections": {1, 2}}
    assert KnownPathConnection._idle(SimpleNamespace(**one | changed)) == idle
