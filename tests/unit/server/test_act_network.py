"""ACT's network as it is trained: its parts and their first weights, dropout, positions, and each kind of input."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from jurybox.server.robot_policies import ActNetwork, ActSizes
from jurybox.server.robot_policies.act import _FrozenNorm, _places, resnet

SMALL = {"action": 3, "chunk": 5, "width": 32, "heads": 4, "feedforward": 96, "encoder_layers": 2, "latent": 4}


def network(backbone=None, channels=6, **sizes):
    torch.manual_seed(0)
    return ActNetwork(ActSizes(**SMALL, **sizes), backbone, channels)


def numbers(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("name", "blocks"), [("resnet18", [2, 2, 2, 2]), ("resnet34", [3, 4, 6, 3])])
def test_a_backbone_has_the_papers_blocks_and_sees_a_32nd_of_each_side(name, blocks):
    net = resnet(name)
    layers = [net.get_submodule(f"layer{number}") for number in range(1, 5)]
    assert [len(layer) for layer in layers] == blocks
    across = [[block.downsample is not None for block in layer] for layer in layers]
    assert across == [[number > 0 and at == 0 for at in range(count)] for number, count in enumerate(blocks)]
    assert [layer[0].conv1.weight.shape[0] for layer in layers] == [64, 128, 256, 512]
    with torch.inference_mode():
        assert net(numbers(2, 3, 64, 96)).shape == (2, 512, 2, 3)


def test_another_backbone_is_refused_with_those_that_there_are():
    with pytest.raises(ValueError, match=r"a backbone 'x{80}': expected one of resnet18, resnet34"):
        resnet("x" * 1000)


def test_a_frozen_normalisation_is_that_of_a_batch_with_fixed_statistics():
    norm, x = _FrozenNorm(3), numbers(2, 3, 4, 5)
    torch.testing.assert_close(norm(x), x / math.sqrt(1 + 1e-5), rtol=0, atol=1e-6)
    norm.weight[:], norm.bias[:], norm.running_mean[:] = numbers(3, seed=2), numbers(3, seed=3), numbers(3, seed=4)
    norm.running_var[:] = torch.tensor([1e-6, 0.5, 9.0])
    expected = functional.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias)
    torch.testing.assert_close(norm(x), expected, rtol=1e-5, atol=1e-4)
    assert not list(norm.parameters())


@pytest.mark.parametrize(("state", "environment"), [(0, 0), (6, 0), (0, 7), (6, 7)])
def test_each_input_is_a_token_with_a_place_of_its_own(state, environment):
    net = network(torch.nn.Conv2d(3, 6, 16, 16), state=state, environment=environment).eval()
    assert net.encoder_1d_feature_pos_embed.num_embeddings == 1 + (state > 0) + (environment > 0)
    seen = []
    net.encoder.register_forward_pre_hook(lambda module, given: seen.append([part.shape for part in given]))
    given = {
        "state": numbers(2, state) if state else None,
        "environment": numbers(2, environment) if environment else None,
        "images": [numbers(2, 3, 32, 48), numbers(2, 3, 16, 16, seed=3)],
    }
    with torch.inference_mode():
        chunks = net(**given)
        assert chunks.shape == (2, 5, 3)
        tokens = 1 + (state > 0) + (environment > 0) + 2 * 3 + 1
        assert seen == [[(2, tokens, 32), (1, tokens, 32)]]
        for name, value in given.items():
            if value is not None:
                other = [value[0], value[1] + 1] if name == "images" else value + 1
                assert not torch.allclose(net(**{**given, name: other}), chunks), name
        alone = net(
            **{name: None if value is None else value[1:] for name, value in given.items() if name != "images"},
            images=[image[1:] for image in given["images"]],
        )
    torch.testing.assert_close(alone, chunks[1:], rtol=1e-4, atol=1e-5)


def test_a_network_without_cameras_has_no_backbone():
    net = network(state=6)
    assert not [name for name, _ in net.named_parameters() if "backbone" in name or "img" in name]
    assert net(state=numbers(4, 6)).shape == (4, 5, 3)


def test_matrices_of_the_transformer_begin_as_glorot_proposed():
    net = network(state=6, decoder_layers=2)
    for part in (*net.encoder.layers, *net.decoder.layers):
        for matrix in (part.linear1.weight, part.linear2.weight, part.self_attn.out_proj.weight):
            bound = math.sqrt(6 / sum(matrix.shape))
            assert 0.95 * bound < float(matrix.detach().abs().max()) <= bound
    assert len(net.encoder.layers) == len(net.decoder.layers) == 2


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_dropout_is_drawn_in_training_alone_and_as_often_as_asked_for(dropout):
    net, given = network(state=6, dropout=dropout), numbers(2, 6)
    with torch.no_grad():
        drawn = [net.train()(state=given) for _ in range(2)]
        kept = [net.eval()(state=given) for _ in range(2)]
    assert torch.equal(*kept)
    assert torch.equal(*drawn) == (dropout == 0.0)
    assert {module.p for module in net.modules() if isinstance(module, torch.nn.Dropout)} == {dropout}
    assert {module.dropout for module in net.modules() if isinstance(module, torch.nn.MultiheadAttention)} == {dropout}


@pytest.mark.parametrize("pre_norm", [False, True])
def test_normalisation_before_attention_has_one_more_at_the_encoders_end(pre_norm):
    net = network(state=6, pre_norm=pre_norm).eval()
    assert isinstance(net.encoder.norm, torch.nn.LayerNorm) == pre_norm
    seen = []
    net.encoder.layers[0].linear1.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    with torch.inference_mode():
        net(state=100 * numbers(2, 6))
    assert float(seen[0].mean(-1).abs().max()) < 1e-4, "the perceptron's input is normalised in either case"


def test_the_sizes_of_the_paper_are_the_usual_ones():
    sizes = ActSizes(action=14, chunk=100)
    assert (sizes.width, sizes.heads, sizes.feedforward, sizes.encoder_layers, sizes.latent) == (512, 8, 3200, 4, 32)
    assert (sizes.decoder_layers, sizes.pre_norm, sizes.activation, sizes.dropout) == (1, False, "relu", 0.1)
    assert (sizes.state, sizes.environment) == (0, 0)


@pytest.mark.parametrize(("height", "width", "channels"), [(2, 3, 8), (1, 1, 4), (4, 2, 12)])
def test_places_are_waves_of_rows_and_then_of_columns_up_to_a_whole_turn(height, width, channels):
    half = channels // 2
    found = _places(height, width, channels, torch.zeros(1, dtype=torch.float64))
    assert found.dtype == torch.float64 and found.shape == (1, height * width, channels)
    for row in range(height):
        for column in range(width):
            expected = []
            for at, count in ((row, height), (column, width)):
                turn = 2 * math.pi * (at + 1) / (count + 1e-6)
                for channel in range(half):
                    angle = turn / 10000 ** (2 * (channel // 2) / half)
                    expected.append(math.cos(angle) if channel % 2 else math.sin(angle))
            assert found[0, row * width + column].tolist() == pytest.approx(expected, abs=3e-6)


def test_places_are_on_the_device_of_the_features():
    assert _places(2, 3, 8, torch.zeros(1, device="meta")).device.type == "meta"


def attention(name):
    return {f"{name}.{part}" for part in ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")}


def linear(*names):
    return {f"{name}.{part}" for name in names for part in ("weight", "bias")}


@pytest.mark.parametrize("pre_norm", [False, True])
def test_parameters_have_the_names_of_lerobots_checkpoints_and_there_are_no_others(pre_norm):
    net = network(resnet("resnet18"), 512, state=6, environment=7, pre_norm=pre_norm, decoder_layers=1)
    names = {"encoder_1d_feature_pos_embed.weight", "decoder_pos_embed.weight"}
    inputs = (f"encoder_{part}_input_proj" for part in ("img_feat", "latent", "robot_state", "env_state"))
    names |= linear("action_head", "decoder.norm", *inputs, *["encoder.norm"] * pre_norm)
    for layer in ("encoder.layers.0", "encoder.layers.1", "decoder.layers.0"):
        norms = 3 if "decoder" in layer else 2
        names |= attention(f"{layer}.self_attn") | linear(f"{layer}.linear1", f"{layer}.linear2")
        names |= linear(*(f"{layer}.norm{number + 1}" for number in range(norms)))
    names |= attention("decoder.layers.0.multihead_attn")
    convolutions = {"conv1": "bn1"}
    for layer in range(1, 5):
        for block in range(2):
            convolutions |= {f"layer{layer}.{block}.conv{at}": f"layer{layer}.{block}.bn{at}" for at in (1, 2)}
        if layer > 1:
            convolutions[f"layer{layer}.0.downsample.0"] = f"layer{layer}.0.downsample.1"
    for convolution, norm in convolutions.items():
        names.add(f"backbone.{convolution}.weight")
        names |= {f"backbone.{norm}.{part}" for part in ("weight", "bias", "running_mean", "running_var")}
    assert set(net.state_dict()) == names
