"""Trainers' own unmodified clients, if their packages are installed: how they handle scores and failures.

`PYTHONPATH=.:CHECKOUT pytest -rs tests/integration/gateway/test_upstream_clients.py` runs those of a checkout (of POLAR
`src`, of Robometer also `scripts`). test_dialects.py and test_recorded_clients.py also have what they send.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import urllib3.util.connection
from PIL import Image
from tests.serving import serving

MODELS = {
    name: {"factory": f"tests.reward_models:{name}", "max_batch": 32, "rows": 512, "lane_rows": 32}
    for name in (
        "brightness",
        "brightness_and_prompt",
        "judged",
        "changed",
        "frames",
        "text_length",
        "pair",
        "progress",
    )
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
    "lmdeploy": {"speaks": "reward_model", "model": "text_length", "output": "score", "like": "lmdeploy"},
    "pairs": {"speaks": "reward_model", "model": "pair"},
    "nemo_gym": {"model": "text_length", "output": "score", "port": 0},
    "robometer": {"model": "progress", "output": "score"},
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


class Words:
    """A tokenizer that keeps every byte, as files that transformers reads."""

    def __init__(self, folder) -> None:
        transformers = pytest.importorskip("transformers", reason="transformers is not installed")
        tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
        letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        made = tokenizers.Tokenizer(tokenizers.models.BPE({one: i for i, one in enumerate(letters)}, []))
        made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = tokenizers.decoders.ByteLevel()
        template = "{% for one in messages %}[{{ one.role }}]{{ one.content }}{% endfor %}"
        self.fast = transformers.PreTrainedTokenizerFast(
            tokenizer_object=made, eos_token="</s>", chat_template=template
        )
        self.fast.save_pretrained(folder)


@pytest.mark.parametrize(("kind", "dialect"), [("sglang", "texts"), ("vllm", "texts"), ("lmdeploy", "lmdeploy")])
def test_polars_client(server, tmp_path, monkeypatch, kind, dialect):
    """It tries eight times whatever the status is, and then has None for the whole batch, which no trainer can add."""
    polar = pytest.importorskip("polar.reward_func", reason="POLAR is not installed")
    Words(tmp_path)
    monkeypatch.setattr(polar, "sleep", lambda _: None)
    address = f"{server.listening('http')}/dialects/{dialect}"
    client = polar.RewardModelClient(str(tmp_path), server_type=kind, server_address=address)
    rows = [
        {"prompt": [{"role": "user", "content": "2+2?"}], "reference": "4", "output": said} for said in ("4", "four")
    ]
    whole = "2+2?\n4<|reward|>2+2?\n{}[UNUSED_TOKEN_130]"
    assert client(rows) == [float(len(whole.format(said))) for said in ("4", "four")]
    assert client([rows[0], {**rows[1], "output": "a bad one"}]) is None


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_verls_client_of_a_discriminative_reward_model(server, tmp_path, engine):
    """A status of 4xx is raised at once, and the sample has no reward."""
    aiohttp = pytest.importorskip("aiohttp", reason="aiohttp is not installed")
    loop = pytest.importorskip("verl.experimental.reward_loop.reward_loop", reason="verl is not installed")
    from verl.protocol import DataProto

    words = Words(tmp_path).fast
    worker = object.__new__(loop.RewardLoopWorker)  # it would load the tokenizers of a whole configuration
    model = SimpleNamespace(rollout=SimpleNamespace(name=engine), model_path="rm")
    worker.config = SimpleNamespace(reward=SimpleNamespace(reward_model=model))
    worker.reward_router_address = f"{server.listening('http')}/dialects/texts"
    worker.input_tokenizer = worker.reward_model_tokenizer = words

    def scored(said: str) -> dict[str, float]:
        ids = torch.tensor([words.encode(said)])
        asked = np.empty(1, object)
        asked[0] = [{"role": "user", "content": "2+2?"}]
        tensors = {"responses": ids, "attention_mask": torch.ones_like(ids)}
        return asyncio.run(worker.compute_score_disrm(DataProto.from_dict(tensors, {"raw_prompt": asked})))

    assert scored("four") == {"reward_score": float(len("[user]2+2?[assistant]four"))}
    with pytest.raises(aiohttp.ClientResponseError) as raised:
        scored("a bad one")
    assert raised.value.status == 422


@contextlib.contextmanager
def answering(answer: dict):
    """An HTTP server that has one answer to every POST; yields its port."""

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answers) as one:
        thread = threading.Thread(target=one.serve_forever)
        thread.start()
        try:
            yield one.server_port
        finally:
            one.shutdown()
            thread.join()


def test_nemo_gyms_agent(server):
    """A whole rollout: seed the session, let the policy respond, verify. An error status is raised with its words."""
    aiohttp = pytest.importorskip("aiohttp", reason="aiohttp is not installed")
    agents = pytest.importorskip("responses_api_agents.simple_agent.app", reason="NeMo Gym is not installed")
    from nemo_gym import server_utils
    from nemo_gym.config_types import BaseServerConfig, ModelServerRef, ResourcesServerRef
    from omegaconf import OmegaConf

    with server.connect() as client:
        host, _, port = client.status()["server"]["dialects"]["nemo_gym"].rpartition(":")

    def rolled_out(said: str):
        part = {"type": "output_text", "text": said, "annotations": []}
        message = {"id": "m", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
        message |= {"prompt_token_ids": [1, 2], "generation_token_ids": [3], "generation_log_probs": [-0.5]}
        reply = {"id": "r", "created_at": 1.0, "model": "m", "object": "response", "output": [message]}
        reply |= {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
        with answering(reply) as policy:
            known = {
                "rewards": {"resources_servers": {"ours": {"host": host, "port": int(port)}}},
                "agent": {"responses_api_agents": {"simple_agent": {"host": "127.0.0.1", "port": policy}}},
            }
            head, known = BaseServerConfig(host="127.0.0.1", port=1), OmegaConf.create(known)
            agent = agents.SimpleAgent(
                config=agents.SimpleAgentConfig(
                    host="127.0.0.1", port=policy, entrypoint="app.py", name="agent",
                    resources_server=ResourcesServerRef(type="resources_servers", name="rewards"),
                    model_server=ModelServerRef(type="responses_api_models", name="policy"),
                ),
                server_client=server_utils.ServerClient(head_server_config=head, global_config_dict=known),
            )  # fmt: skip
            row = {"responses_create_params": {"input": [{"role": "user", "content": "2+2?"}]}, "expected_answer": "4"}

            async def run():
                server_utils.set_global_aiohttp_client(server_utils.GlobalAIOHTTPAsyncClientConfig())
                try:
                    return await agent.run(SimpleNamespace(cookies={}), agents.SimpleAgentRunRequest(**row))
                finally:
                    await server_utils._GLOBAL_AIOHTTP_CLIENT.close()
                    server_utils._GLOBAL_AIOHTTP_CLIENT = None

            return asyncio.run(run()).model_dump()

    found = rolled_out("four")
    assert (found["reward"], found["expected_answer"]) == (4.0, "4")
    assert found["response"]["output"][0]["generation_token_ids"] == [3]
    with pytest.raises(aiohttp.ClientResponseError) as raised:
        rolled_out("a bad one")
    assert raised.value.status == 422 and b"a bad text" in raised.value.response_content


def test_robometers_script(server):
    script = pytest.importorskip("example_inference", reason="Robometer's scripts are not on the path")
    requests = pytest.importorskip("requests", reason="requests is not installed")
    url = f"http://{server.listening('http')}/dialects/robometer"
    video = np.full((3, 8, 8, 3), 51, np.uint8)
    progress, success = script.compute_rewards_per_frame(url, video, "pick")
    assert np.allclose(progress, [0.2]) and not success.size
    for wrong, options in ((video[:, :, :, :1], {}), (0 * video, {}), (video, {"use_frame_steps": True})):
        with pytest.raises(requests.HTTPError):
            script.compute_rewards_per_frame(url, wrong, "pick", **options)


def test_robometers_evaluations(server):
    """It reads a missing progress as 0 and clamps others to 0 and 1, so neither may come."""
    utils = pytest.importorskip("robometer.evals.eval_utils", reason="Robometer is not installed")
    aiohttp = pytest.importorskip("aiohttp", reason="aiohttp is not installed")
    url = f"http://{server.listening('http')}/dialects/robometer"

    async def posted(*values: int) -> dict:
        samples = [
            utils.raw_dict_to_sample({"frames": np.full((4, 8, 8, 3), one, np.uint8), "task": "pick"}, max_frames=4)
            for one in values
        ]
        async with aiohttp.ClientSession() as session:
            return await utils.post_batch_npy_async(session, url, *utils.build_payload(samples))

    assert np.allclose(utils.extract_rewards_from_output(asyncio.run(posted(51, 102))), [0.2, 0.4])
    for value in (0, 255):  # no score; one above 1
        with pytest.raises(aiohttp.ClientResponseError):
            asyncio.run(posted(51, value))
