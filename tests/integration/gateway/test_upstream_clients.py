"""Trainers' own unmodified clients, if their packages are installed: how they handle scores and failures.

`PYTHONPATH=CHECKOUT pytest -rs tests/integration/gateway/test_upstream_clients.py` runs those of a checkout.
test_dialects.py also has what they send.
"""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
import urllib3.util.connection
from PIL import Image
from tests.serving import serving

MODELS = {
    name: {"factory": f"tests.reward_models:{name}", "max_batch": 32, "rows": 512, "lane_rows": 32}
    for name in ("brightness", "brightness_and_prompt", "judged", "changed", "frames", "text_length", "pair")
}
DIALECTS = {
    "flow_grpo": {"model": "brightness", "output": "score", "port": 0},
    "geneval": {"speaks": "flow_grpo", "model": "geneval", "port": 0},
    "verl_omni": {"model": "brightness_and_prompt", "output": "score"},
    "edited": {"speaks": "verl_omni", "model": "changed", "output": "score", "inputs": {"source": "source"}},
    "unifiedreward": {"model": "brightness_and_prompt", "output": "score", "resize": [64, 64]},  # it sends 512 x 512
    "flow_factory": {"model": "changed", "output": "score", "inputs": {"source": "source"}},
    "films": {"speaks": "flow_factory", "model": "frames", "output": "score", "inputs": {"video": "video"}},
    "gen_eval": {"speaks": "verl_omni", "model": "geneval"},
    "texts": {"speaks": "reward_model", "model": "text_length", "output": "score"},
    "pairs": {"speaks": "reward_model", "model": "pair"},
}
PANEL = """
[panels.geneval.members]
scores = {weight = 1, model = "judged", output = "graded"}
rewards = {weight = 0, model = "judged", output = "right"}
strict_rewards = {weight = 0, model = "judged", output = "strict"}
"""
METADATA = [
    {"tag": tag, "prompt": "p", "include": [{"class": "cat", "count": count}]}
    for tag, count in (("counting", 1), ("colors", 2))
]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("server"), MODELS, dialects=DIALECTS, http="127.0.0.1:0", more=PANEL) as one:
        yield one


def planes(*values: int) -> torch.Tensor:
    return torch.stack([torch.full((3, 32, 32), value / 255) for value in values])


def test_flow_grpo(server, monkeypatch):
    """Its addresses are constants."""
    rewards = pytest.importorskip("flow_grpo.rewards", reason="flow_grpo is not installed")
    with server.connect() as client:
        own = {name: address.rpartition(":") for name, address in client.status()["server"]["dialects"].items()}
    ports = {18086: own["flow_grpo"][2], 18085: own["geneval"][2]}
    connect = urllib3.util.connection.create_connection
    monkeypatch.setattr(
        urllib3.util.connection, "create_connection", lambda to, *a, **k: connect((to[0], int(ports[to[1]])), *a, **k)
    )
    deqa = rewards.deqa_score_remote("cpu")
    scores, _ = deqa(planes(*[51, 102] * 40), ["a"] * 80, {})
    assert np.allclose(scores, [0.2, 0.4] * 40, atol=1e-3)
    for value in (0, 255):
        with pytest.raises(KeyError, match="outputs"):
            deqa(planes(51, value), ["a"] * 2, {})
    several = rewards.multi_score("cpu", {"deqa": 1.0, "geneval": 0.5})
    details, _ = several(planes(102, 153), ["a", "b"], METADATA)
    assert np.allclose(details["avg"], [0.4 + 0.7, 0.6 + 1.3], atol=1e-3)
    assert details["strict_accuracy"] == [0.0, 1.0] and details["colors_strict_accuracy"] == [-10.0, 1.0]


def test_unifiedreward_of_flow_grpo(server, monkeypatch):
    """Its address is a constant, too; nothing else is changed."""
    rewards = pytest.importorskip("flow_grpo.rewards", reason="flow_grpo is not installed")
    openai = pytest.importorskip("openai", reason="openai is not installed")
    real, url = openai.AsyncOpenAI, f"http://{server.listening('http')}/dialects/unifiedreward/v1"
    monkeypatch.setattr(openai, "AsyncOpenAI", lambda base_url, **more: real(base_url=url, **more))
    scorer = rewards.unifiedreward_score_sglang("cpu")
    pictures = torch.stack([torch.full((3, 64, 64), value / 255) for value in (51, 102)])
    scores, _ = scorer(pictures, ["ab", "abc"], {})
    assert np.allclose(scores, [2.2 / 5, 3.4 / 5], atol=1e-3)
    with pytest.raises(openai.APIStatusError, match="expected 1 to 5"):
        scorer(pictures[:1], [""], {})


def test_flow_factory(server):
    module = "flow_factory.rewards.my_reward_remote"
    remote = pytest.importorskip(module, reason="flow_factory is not installed")
    base = f"http://{server.listening('http')}/dialects"
    images = [Image.new("RGB", (32, 32), (value,) * 3) for value in (51, 153)]
    client = remote.RemoteRewardClient(f"{base}/flow_factory")
    assert client.health_check()
    found = client.compute(["a", "b"], images[::-1], condition_images=[[images[0]]] * 2)
    assert np.allclose(found, [0.4, 0.0], atol=1e-3)
    with pytest.raises(RuntimeError, match="source"):
        client.compute(["a", "b"], images)
    found = remote.RemoteRewardClient(f"{base}/films").compute(["a"], video=[images])
    assert np.allclose(found, [2.4], atol=1e-3)


def test_deepgen_rl(server):
    module = "deepgen_rl.reward_evaluator.reward_evaluator"
    evaluator = pytest.importorskip(module, reason="deepgen_rl is not installed")
    base = f"http://{server.listening('http')}/dialects"
    client = evaluator.RewardEvaluatorClient(
        {
            "aesthetic": f"{base}/verl_omni/",
            "threads": f"{base}/verl_omni/",
            "gen_eval": f"{base}/gen_eval/",
            "editreward": f"{base}/edited/",
        },
        {"threads": 2},
    )
    images = [Image.new("RGB", (32, 32), (value,) * 3) for value in (102, 153)]
    for name in ("aesthetic", "threads"):
        found = client.evaluate(name, images, ["ab", "abc"])
        assert np.allclose(found["scores"] if isinstance(found, dict) else found, [2.4, 3.6], atol=1e-3)
    found = client.evaluate("editreward", {"source": images[:1] * 2, "edited": images}, ["a", "b"])
    assert np.allclose(found["scores"] if isinstance(found, dict) else found, [0.0, 0.2], atol=1e-3)
    judged = client.evaluate("gen_eval", images, ["a", "b"], {"meta_datas": METADATA, "only_strict": False})
    assert judged["rewards"] == [1.0, 1.0] and judged["group_rewards"]["colors"] == [-10.0, 1.0]
    with pytest.raises(RuntimeError, match="422"):
        client.evaluate("aesthetic", [images[0], Image.new("RGB", (32, 32))], ["a", "b"])


def test_verl_omni(server):
    module = "verl_omni.utils.reward_score.http_scorer_client"
    client = pytest.importorskip(module, reason="verl-omni is not installed")
    url = f"http://{server.listening('http')}/dialects/verl_omni"

    async def scored(*values: int) -> list[object]:
        calls = (
            client.compute_score(torch.full((3, 32, 32), value, dtype=torch.uint8), "ab", url, extra_info={})
            for value in values
        )
        try:
            return await asyncio.gather(*calls, return_exceptions=True)
        finally:
            await client.compute_score._session.close()

    good, black, white = asyncio.run(scored(51, 0, 255))
    assert np.isclose(good["score"], 2.2, atol=1e-3)
    assert "a black picture" in str(black) and "the score is nan" in str(white)


def test_openais_client_of_a_judge_and_of_embeddings(server):
    openai = pytest.importorskip("openai", reason="openai is not installed")
    url = f"http://{server.listening('http')}/dialects/texts/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        assert [one.id for one in client.models.list().data] == ["text_length"]
        chat = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "abcd"}], temperature=0)
        assert chat.choices[0].message.content == "4.000000"
        for options in ({}, {"encoding_format": "float"}):  # by default it asks for base64
            found = client.embeddings.create(model="m", input=["ab", "abc"], **options)
            assert [one.embedding for one in found.data] == [[2.0], [3.0]]
        with pytest.raises(openai.APIStatusError, match="a bad text"):
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": "bad"}])


def test_coheres_client_of_a_reranker(server):
    cohere = pytest.importorskip("cohere", reason="cohere is not installed")
    client = cohere.ClientV2(base_url=f"http://{server.listening('http')}/dialects/pairs", api_key="none")
    found = client.rerank(model="m", query="q", documents=["b", "bbb", "bb"], top_n=2)
    assert [(one.index, one.relevance_score) for one in found.results] == [(1, 103.0), (2, 102.0)]
    with pytest.raises(cohere.core.ApiError):
        client.rerank(model="m", query="q" * 3000, documents=["b"], request_options={"max_retries": 0})
