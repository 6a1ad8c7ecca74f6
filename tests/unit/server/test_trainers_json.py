"""What the JSON and the pickles of trainers become, which of them are refused, and how each is answered."""

from __future__ import annotations

import json
import pickle

import pytest

from jurybox import native
from jurybox.client.juror import Passing, Scores
from jurybox.protocol.errors import Code, Error, ProtocolMismatch, Refused, SpecMismatch
from jurybox.server.gateway.dialects.intake import RequestScores
from jurybox.server.gateway.dialects.json_dialects import flow_factory, openrlhf, parsed, slime, unirl
from jurybox.server.gateway.dialects.pickle_dialects import flow_grpo, verl_omni
from jurybox.server.gateway.dialects.pickle_dialects import refusal as pickled_refusal
from jurybox.server.gateway.dialects.pickles import loads
from jurybox.server.security.limits import HTTP, OF_REQUEST, RECEIVED, Charge, budget_of

TAGS = ["single_object", "two_object", "counting", "colors", "position", "color_attr"]
PARTS = {"rewards": [0.5, 1.0], "strict_rewards": [0.0, 1.0]}


class Intake:
    """Scores rows by its list, and keeps what it was asked."""

    reward = "fine"

    def __init__(self, *scores, takes=(), **parts):
        self.scores, self.parts, self.rewards = list(scores) or [0.5] * 9, parts, ["fine", *parts]
        self.takes = set(takes).__contains__
        self.request = None

    async def answered(self, read, write, body):
        self.request = request = read(body)
        return write(request, RequestScores(self.scores[: request.n], 7, self.parts))

    async def answered_rows(self, read, write, body):
        self.request = request = read(body)
        found = Scores(self.scores[: request.n], [7])
        found.parts = self.parts
        return write(request, found)


async def asked(dialect, given, intake=None):
    """What a JSON body is answered, and the request that it became."""
    intake = intake or Intake()
    reply = await dialect(intake, given if type(given) is bytes else json.dumps(given).encode())
    assert reply.media == "application/json" and reply.status == 200
    return json.loads(reply.body), reply.version, intake.request


async def refusal(dialect, given, intake=None):
    with pytest.raises(Error) as refused:
        await asked(dialect, given, intake)
    return refused.value


async def test_openrlhf_gets_its_scores_twice_and_a_version_and_the_parts_for_each_row():
    given = {"query": ["q1", "q2"], "prompts": ["p1", "p2"], "labels": ["l", None], "seed": 3, "note": None}
    answer, version, request = await asked(openrlhf, given, Intake(0.25, 0.75, short=[1.0, 2.0]))
    assert answer == {
        "rewards": [0.25, 0.75],
        "scores": [0.25, 0.75],
        "extra_logs": {"short": [1.0, 2.0], "weights_version": [7, 7]},
    }
    assert version is None and request.n == 2 and request.parameters == {"seed": 3}
    queries = {"query": ["q1", "q2"], "text": ["q1", "q2"]}
    assert request.columns == queries | {"prompt": ["p1", "p2"], "label": ["l", None]}
    _, _, request = await asked(openrlhf, {"query": ["q1", "q2"], "prompts": None})
    assert request.columns == queries


async def test_openrlhfs_other_servers_get_nothing_and_answer_nothing():
    answer, _, request = await asked(openrlhf, {"query": []})
    assert answer == {"rewards": [], "scores": [], "extra_logs": {}} and request.n == 0


async def test_slime_gets_a_number_alone():
    answer, version, request = await asked(slime, {"prompt": [{"role": "user"}], "response": "r", "label": None})
    assert (answer, version) == (0.5, 7)
    assert request.columns == {"prompt": [[{"role": "user"}]], "response": ["r"]} and request.n == 1
    _, _, request = await asked(slime, {"label": "l", "temperature": 0.5, "other": ["x"]})
    assert request.columns == {"label": ["l"]} and request.parameters == {"label": "l", "temperature": 0.5}


@pytest.mark.parametrize("dialect", [openrlhf, slime, flow_factory, unirl])
async def test_a_body_that_is_no_object_of_json_is_refused(dialect):
    assert "expected a JSON object, came list" in str(await refusal(dialect, []))
    for body in (b"{", b'{"prompt": 1e999}', b"\xff", b"[" * 100_000):
        error = await refusal(dialect, body)
        assert "the body is not JSON: " in str(error) and error.code == Code.MALFORMED


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({}, "expected a list in 'query', came NoneType"),
        ({"query": "q"}, "expected a list in 'query', came str"),
        ({"query": ["q"], "prompts": ["p", "p"]}, "expected 1 values in 'prompts', came 2"),
        ({"query": ["q"], "labels": []}, "expected 1 values in 'labels', came 0"),
    ],
)
async def test_openrlhf_sends_as_many_of_each(given, why):
    error = await refusal(openrlhf, given)
    assert type(error) is SpecMismatch and why in str(error)


async def test_flow_factorys_pictures_are_found_by_their_fields():
    given = {"prompt": ["a", "b"], "image": ["i", "j"], "video": None, "condition_images": [], "steps": 4}
    answer, version, request = await asked(flow_factory, given | {"condition_videos": []})
    assert (answer, version) == ({"rewards": [0.5, 0.5]}, 7)
    assert request.columns == {"prompt": ["a", "b"], "text": ["a", "b"]} and request.parameters == {"steps": 4}
    assert request.pictures == {"image": ["i", "j"]} and request.n == 2
    given = {"prompt": ["a"], "video": [["f", "g"]], "condition_images": [["c"]]}
    _, _, request = await asked(flow_factory, given, Intake(takes=["video", "source"]))
    assert request.pictures == {"video": [["f", "g"]], "source": ["c"]}


@pytest.mark.parametrize(
    ("given", "takes", "why", "code"),
    [
        ({"condition_videos": ["v"]}, [], "condition_videos is not supported", Code.UNSUPPORTED),
        ({"video": ["f"]}, ["video"], "expected a list of frames for each sample in 'video'", Code.SPEC_MISMATCH),
        ({"video": [["f"]]}, ["source"], "video is no input of the model", Code.UNSUPPORTED),
        ({"condition_images": [["c"]]}, ["video"], "condition_images is no input of the model", Code.UNSUPPORTED),
        ({"condition_images": ["c"]}, ["source"], "expected one picture for each sample", Code.UNSUPPORTED),
        ({"condition_images": [["c", "d"]]}, ["source"], "expected one picture for each sample", Code.UNSUPPORTED),
        ({"image": ["i", "j"]}, [], "expected 1 values in 'image', came 2", Code.SPEC_MISMATCH),
        ({"condition_images": [["c"]] * 2}, ["source"], "expected 1 values in 'condition_i", Code.SPEC_MISMATCH),
    ],
)
async def test_what_flow_factory_cannot_have_is_refused(given, takes, why, code):
    error = await refusal(flow_factory, {"prompt": ["a"], **given}, Intake(takes=takes))
    assert why in str(error) and error.code == code


def turns(*history, required=("fine",), **more):
    return {"history": list(history), "required_rewards": list(required), **more}


async def test_unirls_last_turn_is_scored_with_a_picture_or_without_one():
    given = [turns({"text": "no"}, {"text": "a"}, metadata={"k": 1}), turns({}), turns({"text": None})]
    answer, version, request = await asked(unirl, {"requests": given}, Intake(0.25, 0.5, 0.75))
    results = [{"fine": {"score": score}} for score in (0.25, 0.5, 0.75)]
    assert (answer, version) == ({"results": results, "errors": [{}, {}, {}]}, 7)
    texts = ["a", "", ""]
    assert request.columns == {"text": texts, "prompt": texts, "metadata": ['{"k": 1}', "null", "null"]}
    assert not request.pictures and request.n == 3
    given = [turns({"image_b64": "first"}, {"image_b64": name, "text": "edit"}) for name in "ij"]
    _, _, request = await asked(unirl, {"requests": given})
    assert request.pictures == {"image": ["i", "j"]}
    _, _, request = await asked(unirl, {"requests": given}, Intake(takes=["source"]))
    assert request.pictures == {"image": ["i", "j"], "source": ["first", "first"]}


async def test_unirl_gets_the_scores_that_there_are_and_the_errors_of_those_that_it_required():
    intake = Intake(0.5, "dark" * 200, short=["late", 2.0])
    given = {"requests": [turns({"text": "a"}), turns({"text": "b"}, required=["fine", "short"])]}
    answer, _, _ = await asked(unirl, given, intake)
    assert answer["results"] == [{"fine": {"score": 0.5}}, {"short": {"score": 2.0}}]
    first, second = answer["errors"]
    assert first == {} and second.keys() == {"fine"} and len(second["fine"]) == 500


@pytest.mark.parametrize(("required", "passes"), [(["short"], True), (["fine"], False)])
async def test_unirl_retries_what_it_required_and_may_come_soon(required, passes):
    intake = Intake(0.5, short=[Passing("busy")])
    given = {"requests": [turns({"text": "a"}, required=required)]}
    if passes:
        error = await refusal(unirl, given, intake)
        assert str(error) == "busy" and error.code == Code.NOT_READY
    else:
        answer, _, _ = await asked(unirl, given, intake)
        assert answer == {"results": [{"fine": {"score": 0.5}}], "errors": [{}]}


PICTURED = {"image_b64": "i"}


@pytest.mark.parametrize(
    ("requests", "why"),
    [
        (["a"], "expected requests with a history of at least one turn"),
        ([{"required_rewards": ["fine"]}], "expected requests with a history of at least one turn"),
        ([turns()], "expected requests with a history of at least one turn"),
        ([turns("a")], "expected requests with a history of at least one turn"),
        ([{"history": {"a": {}}, "required_rewards": ["fine"]}], "expected requests with a history of at least one"),
        ([turns({}, required=[])], "required_rewards is [], expected names of fine"),
        ([turns({}, required=["other"])], 'required_rewards is ["other"], expected names of fine'),
        ([{"history": [{}], "required_rewards": "fine"}], 'required_rewards is "fine", expected names of fine'),
        ([{"history": [{}], "required_rewards": {"fine": 1}}], 'required_rewards is {"fine": 1}, expected names of'),
        ([turns({"video_b64": "v"})], "video is not supported, expected image_b64 or text"),
        ([turns({"video_path": "/v"})], "video is not supported, expected image_b64 or text"),
        ([turns(PICTURED), turns({})], "some samples have a picture and some none: send separate requests"),
        ([turns({}), turns(PICTURED)], "some samples have a picture and some none: send separate requests"),
    ],
)
async def test_a_request_of_unirl_of_another_form_is_refused(requests, why):
    error = await refusal(unirl, {"requests": requests})
    assert type(error) is ProtocolMismatch and str(error).startswith(why) and error.code == Code.MALFORMED


@pytest.mark.parametrize("history", [[PICTURED], ["a", PICTURED], [{}, PICTURED], [{"image_b64": 7}, PICTURED]])
async def test_an_edit_of_unirl_has_its_picture_from_before(history):
    error = await refusal(unirl, {"requests": [turns(*history)]}, Intake(takes=["source"]))
    assert "expected two turns with image_b64" in str(error) and error.code == Code.MALFORMED


@pytest.mark.parametrize("long", [5, 9000], ids=["short", "long"])
async def test_beside_a_long_string_other_values_are_read_as_always(long):
    text = "x" * long
    given = {"prompt": text, "response": "r", "n": 0.5}
    for encoding in ("utf-8", "utf-16", "utf-8-sig"):
        assert parsed(json.dumps(given).encode(encoding)) == given
    error = await refusal(slime, f'{{"prompt": "{text}", "n": 1e999}}'.encode())
    assert "the number 1e999 is too large for a float" in str(error)


@pytest.mark.parametrize(("long", "most"), [(3000, 5000), (9000, 100)])
def test_what_is_checked_before_it_is_parsed_has_no_long_strings(long, most):
    seen = []
    body = json.dumps({"prompt": "x" * long, "n": 1}).encode()
    assert parsed(body, seen.append)["n"] == 1
    assert len(seen) == 1 and b'"n": 1' in seen[0] and len(seen[0]) < most

    def refuse(_text):
        raise SpecMismatch("no")

    for given in (body, b"not even JSON"):
        with pytest.raises(SpecMismatch, match="no"):
            parsed(given, refuse)


@pytest.mark.parametrize(
    "given",
    [["abc"] * 50_000, "é" * 200_000, [["abc"] * 50_000, "x" * 9000]],
    ids=["many", "wide", "beside a long one"],
)
async def test_what_parsed_json_takes_is_counted_until_the_answer(given):
    budget = budget_of(64 << 20)
    account = native.Account(budget, HTTP)
    charge = Charge(budget, account)
    before = OF_REQUEST.set(charge)
    try:
        parsed(json.dumps({"a": given}, ensure_ascii=False).encode())
        assert account.held(RECEIVED) >= 400_000
        charge.give()
        assert account.held(RECEIVED) == 0
    finally:
        OF_REQUEST.reset(before)


async def pickled(dialect, given, intake=None):
    """What a pickle is answered, and the request that it became."""
    intake = intake or Intake()
    reply = await dialect(intake, pickle.dumps(given))
    assert (reply.media, reply.status, reply.version) == ("application/octet-stream", 200, 7)
    return loads(reply.body), intake.request


@pytest.mark.parametrize(("dialect", "named"), [(flow_grpo, "outputs"), (verl_omni, "scores")])
async def test_trainers_of_pickles_get_their_scores_by_their_name(dialect, named):
    answer, request = await pickled(dialect, {"images": [b"i", b"j"]}, Intake(0.25, 0.5))
    assert answer == {named: [0.25, 0.5]}
    assert request.pictures == {"image": [b"i", b"j"]} and not request.columns and request.n == 2
    given = {"images": [b"i"], "prompts": ["p"], "metadata": {"step": 1}}
    assert (await pickled(dialect, given))[1].columns == {"prompt": ["p"]}


async def test_the_pictures_of_an_edit_are_fields_of_their_names():
    given = {"images": {"before": [b"b", b"c"], "edited": [b"i", b"j"]}}
    _, request = await pickled(verl_omni, given, Intake(takes=["before"]))
    assert request.pictures == {"before": [b"b", b"c"], "image": [b"i", b"j"]} and request.n == 2


@pytest.mark.parametrize(
    ("given", "kind", "why"),
    [
        ([b"i"], SpecMismatch, "expected a pickled dict with 'images', came a list"),
        ({}, SpecMismatch, "expected a list in 'images', came NoneType"),
        ({"images": [b"i"], "prompts": ["p", "p"]}, SpecMismatch, "expected 1 values in 'prompts', came 2"),
        ({"images": [b"i"], "prompts": [b"p"]}, SpecMismatch, "expected prompts of text"),
        ({"images": {}}, SpecMismatch, "expected pictures, came an empty dict"),
        ({"images": {"edited": b"i"}}, SpecMismatch, "expected a list in 'edited', came bytes"),
        ({"images": {"edited": [b"i"], "before": []}}, SpecMismatch, "expected 1 values in 'before', came 0"),
        (
            {"images": {"edited": [b"i"], "after": [b"a"]}},
            Refused,
            "an edit with the pictures 'edited', 'after': name 'after' in the dialect's inputs",
        ),
        (
            {"images": {"edited": [b"i"], "image": [b"a"]}},
            Refused,
            "an edit with the pictures 'edited', 'image': expected a field for each, but two have the same",
        ),
    ],
)
@pytest.mark.parametrize("dialect", [flow_grpo, verl_omni])
async def test_a_pickle_of_another_form_is_refused(dialect, given, kind, why):
    with pytest.raises(kind) as refused:
        await pickled(dialect, given, Intake(takes=["before"]))
    assert str(refused.value).startswith(why)
    assert refused.value.code == (Code.UNSUPPORTED if kind is Refused else Code.SPEC_MISMATCH)


def judged(tags=("counting", "colors"), *, at=flow_grpo, **more):
    """A request of GenEval, which one of the two trainers sends within its metadata."""
    described = {"meta_datas": [{"tag": tag, "prompt": f"of {tag}", "n": 1} for tag in tags], **more}
    images = {"images": [b"i"] * len(tags)}
    return images | described if at is flow_grpo else images | {"metadata": described}


@pytest.mark.parametrize("dialect", [flow_grpo, verl_omni])
@pytest.mark.parametrize("strict", [None, True])
async def test_geneval_gets_the_members_of_its_panel_by_tag(dialect, strict):
    more = {} if strict is None else {"only_strict": strict}
    answer, request = await pickled(dialect, judged(at=dialect, **more), Intake(0.25, 0.75, **PARTS))
    prompts = ["of counting", "of colors"]
    assert request.columns["prompt"] == request.columns["text"] == prompts
    assert json.loads(request.columns["metadata"][1]) == {"tag": "colors", "prompt": "of colors", "n": 1}
    rewards = [0.0, 0.0] if strict else PARTS["rewards"]
    assert answer["scores"] == [0.25, 0.75]
    assert (answer["rewards"], answer["strict_rewards"]) == (rewards, PARTS["strict_rewards"])
    assert list(answer["group_rewards"]) == list(answer["group_strict_rewards"]) == TAGS
    assert answer["group_rewards"]["counting"] == [rewards[0], -10.0]
    assert answer["group_strict_rewards"]["colors"] == [-10.0, 1.0]
    assert answer["group_rewards"]["position"] == [-10.0, -10.0]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (judged(["none"]), "expected a 'tag' in each of 'meta_datas', one of single_object, .*, came 'none'"),
        ({"images": [b"i"], "meta_datas": ["a"]}, "expected a 'tag' in each of 'meta_datas'.*, came None"),
        ({"images": [b"i"], "meta_datas": []}, "expected 1 values in 'meta_datas', came 0"),
        ({"images": [b"i"], "meta_datas": [{"tag": "colors", "x": b"b"}]}, "expected plain values in 'meta_datas': "),
    ],
)
async def test_geneval_describes_each_picture(given, why):
    with pytest.raises(SpecMismatch, match=why):
        await pickled(flow_grpo, given, Intake(**PARTS))


async def test_geneval_needs_a_panel_of_its_judgements():
    with pytest.raises(Refused, match="need a panel with the members .*; strict_rewards is missing in 'fine'"):
        await pickled(flow_grpo, judged(), Intake(rewards=[1.0, 1.0]))


def test_a_trainer_of_pickles_gets_errors_as_pickles():
    body, media = pickled_refusal("why", 422)
    assert loads(body) == {"error": "why"} and media == "application/octet-stream"
