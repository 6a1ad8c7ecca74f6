"""LeRobot's checkpoints give the same actions as LeRobot, or an error that says why not.

What LeRobot 0.4.4 answered is in data/lerobot_act.npz. It loaded the folders that `checkpoint` writes:

    policy = ACTPolicy.from_pretrained(folder)
    before = PolicyProcessorPipeline.from_pretrained(folder, config_filename="policy_preprocessor.json")
    after = PolicyProcessorPipeline.from_pretrained(folder, config_filename="policy_postprocessor.json", ...)
    after(policy.predict_action_chunk(before(observation)))
"""

from __future__ import annotations

import json
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from jurybox.server.robot_policies import ActNetwork, ActSizes, lerobot
from jurybox.server.robot_policies.act import resnet

ACTION, STATE, ENVIRONMENT, ROWS = 7, 6, 5, 3
IMAGE = (3, 64, 96)
CONFIG = {
    "type": "act", "n_obs_steps": 1, "chunk_size": 10, "n_action_steps": 6, "vision_backbone": "resnet18",
    "pretrained_backbone_weights": None, "replace_final_stride_with_dilation": False, "pre_norm": False,
    "dim_model": 32, "n_heads": 4, "dim_feedforward": 48, "feedforward_activation": "relu", "n_encoder_layers": 2,
    "n_decoder_layers": 1, "use_vae": False, "latent_dim": 8, "n_vae_encoder_layers": 1,
    "temporal_ensemble_coeff": None, "dropout": 0.1, "device": "cpu", "use_amp": False, "use_peft": False,
    "push_to_hub": False,
    "normalization_mapping": {"VISUAL": "MEAN_STD", "STATE": "MEAN_STD", "ENV": "MEAN_STD", "ACTION": "MEAN_STD"},
    "output_features": {"action": {"type": "ACTION", "shape": [ACTION]}},
}  # fmt: skip
SEEN = {
    "observation.images.top": {"type": "VISUAL", "shape": list(IMAGE)},
    "observation.images.wrist": {"type": "VISUAL", "shape": list(IMAGE)},
    "observation.state": {"type": "STATE", "shape": [STATE]},
}
KNOWN = {
    "observation.state": {"type": "STATE", "shape": [STATE]},
    "observation.environment_state": {"type": "ENV", "shape": [ENVIRONMENT]},
}
KINDS = {  # what differs from CONFIG
    "seen": {"input_features": SEEN},
    "known": {
        "input_features": KNOWN, "pre_norm": True, "feedforward_activation": "gelu", "n_decoder_layers": 2,
        "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "MIN_MAX", "ENV": "IDENTITY", "ACTION": "MIN_MAX"},
    },
}  # fmt: skip


def drawn(name, shape):
    """Numbers that are the same everywhere."""
    return np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, np.float32)


def weights(config):
    """Random weights of the architecture, by LeRobot's names."""
    images = any(feature["type"] == "VISUAL" for feature in config["input_features"].values())
    sizes = ActSizes(
        action=ACTION, chunk=config["chunk_size"], state=STATE, environment=0 if images else ENVIRONMENT,
        width=config["dim_model"], heads=config["n_heads"], feedforward=config["dim_feedforward"],
        encoder_layers=config["n_encoder_layers"], decoder_layers=config["n_decoder_layers"],
        latent=config["latent_dim"], pre_norm=config["pre_norm"],
    )  # fmt: skip
    net = ActNetwork(sizes, resnet(config["vision_backbone"]) if images else None)
    made = {}
    for name, value in net.state_dict().items():
        one = drawn(name, tuple(value.shape))
        if name.endswith("running_var"):
            one = 0.5 + np.abs(one)
        elif value.dim() > 1:
            one /= np.sqrt(np.prod(value.shape[1:]))
        else:
            one = one * 0.1 + (1.0 if name.endswith("weight") else 0.0)
        made[f"model.{name}"] = np.ascontiguousarray(one, np.float32)
    return made


def statistics(config):
    found = {}
    for name, feature in {**config["input_features"], **config["output_features"]}.items():
        shape = (3, 1, 1) if feature["type"] == "VISUAL" else tuple(feature["shape"])
        found[f"{name}.mean"] = drawn(f"{name}.mean", shape) * 0.2
        found[f"{name}.std"] = 0.5 + np.abs(drawn(f"{name}.std", shape))
        found[f"{name}.min"] = -0.1 - np.abs(drawn(f"{name}.min", shape))
        found[f"{name}.max"] = 0.1 + np.abs(drawn(f"{name}.max", shape))
    return found


def checkpoint(folder, kind, **changes):
    """Write a folder as LeRobot's save_pretrained does."""
    config = {**CONFIG, **KINDS[kind], **changes}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights(config), folder / "model.safetensors")
    features = {**config["input_features"], **config["output_features"]}
    common = {"eps": 1e-8, "norm_map": config["normalization_mapping"]}
    files = [f"policy_{name}.safetensors" for name in ("preprocessor_step_3", "postprocessor_step_0")]
    before = [
        {"registry_name": "rename_observations_processor", "config": {"rename_map": {}}},
        {"registry_name": "to_batch_processor", "config": {}},
        {"registry_name": "device_processor", "config": {"device": "cpu", "float_dtype": None}},
        {"registry_name": "normalizer_processor", "config": {**common, "features": features}, "state_file": files[0]},
    ]
    after = [
        {"registry_name": "unnormalizer_processor", "config": {**common, "features": config["output_features"]},
         "state_file": files[1]},
        {"registry_name": "device_processor", "config": {"device": "cpu", "float_dtype": None}},
    ]  # fmt: skip
    for name, steps in (("preprocessor", before), ("postprocessor", after)):
        (folder / f"policy_{name}.json").write_text(json.dumps({"name": f"policy_{name}", "steps": steps}))
    for file in files:
        save_file(statistics(config), folder / file)
    return folder


def observations(kind):
    """ROWS observations, in the form in which robots send them."""
    found = {}
    for name, feature in KINDS[kind]["input_features"].items():
        if feature["type"] == "VISUAL":
            dice = np.random.default_rng(zlib.crc32(name.encode()))
            found[name] = dice.integers(0, 256, (ROWS, *IMAGE[1:], 3), np.uint8)
        else:
            found[name] = drawn(f"{name} seen", (ROWS, *feature["shape"]))
    return found


def answered(model, kind):
    rows = observations(kind)
    with torch.inference_mode():
        return model.module(*(torch.from_numpy(rows[name]) for name in model.inputs)).numpy()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lerobot")
    return {kind: checkpoint(folder / kind, kind) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_gives_the_actions_that_lerobot_gives(folders, kind):
    model = lerobot(str(folders[kind]))
    wanted = np.load(Path(__file__).parent / "data" / "lerobot_act.npz")[kind]
    assert wanted.std() > 0.2  # they say something
    assert str(model.outputs["actions"].shape) == "(6, 7)"
    np.testing.assert_allclose(answered(model, kind), wanted[:, :6], atol=2e-5)
    whole = lerobot(str(folders[kind]), horizon=10)
    np.testing.assert_allclose(answered(whole, kind), wanted, atol=2e-5)


def test_inputs_are_the_policys_features_and_images_are_bytes(folders):
    model = lerobot(str(folders["seen"]))
    assert {name: (spec.dtype, spec.shape) for name, spec in model.inputs.items()} == {
        "observation.images.top": ("uint8", (64, 96, 3)),
        "observation.images.wrist": ("uint8", (64, 96, 3)),
        "observation.state": ("float32", (STATE,)),
    }


def test_statistics_among_the_weights_are_those_of_before_0_4(folders, tmp_path):
    """As a policy had them that was saved before there were pipelines."""
    model, old = lerobot(str(folders["seen"])), tmp_path / "old"
    shutil.copytree(folders["seen"], old)
    kept = load_file(old / "model.safetensors")
    for key, value in statistics(CONFIG | KINDS["seen"]).items():
        feature, _, statistic = key.rpartition(".")
        whose = "unnormalize_outputs" if feature == "action" else "normalize_inputs"
        kept[f"{whose}.buffer_{feature.replace('.', '_')}.{statistic}"] = value
    for name in ("normalize_targets", "unnormalize_targets"):
        kept[f"{name}.buffer_action.mean"] = np.zeros(ACTION, np.float32)
    for part in ("vae_encoder.layers.0.norm1.weight", "vae_encoder_cls_embed.weight", "vae_encoder_pos_enc"):
        kept[f"model.{part}"] = np.zeros(3, np.float32)
    save_file(kept, old / "model.safetensors")
    for file in old.glob("policy_*"):
        file.unlink()
    np.testing.assert_array_equal(answered(lerobot(str(old)), "seen"), answered(model, "seen"))


def changed(folder, file, change):
    found = json.loads((folder / file).read_text())
    change(found)
    (folder / file).write_text(json.dumps(found))


def weighed(change):
    def apply(folder):
        kept = load_file(folder / "model.safetensors")
        change(kept)
        save_file(kept, folder / "model.safetensors")

    return apply


def config_of(**changes):
    return lambda folder: changed(folder, "config.json", lambda config: config.update(changes))


def step_of(**changes):
    return lambda folder: changed(folder, "policy_preprocessor.json", lambda found: found["steps"][3].update(changes))


WRONG = {
    "another policy": (config_of(type="diffusion"), "has type 'diffusion': expected 'act'"),
    "no width": (lambda folder: changed(folder, "config.json", lambda config: config.pop("dim_model")), "'dim_model'"),
    "no JSON": (lambda folder: (folder / "config.json").write_text("{"), "is no JSON"),
    "a list": (lambda folder: (folder / "config.json").write_text("[]"), "expected a JSON object"),
    "an adapter": (config_of(use_peft=True), "adapter"),
    "another activation": (config_of(feedforward_activation="glu"), "expected one of relu, gelu"),
    "another width": (config_of(dim_model=64), "does not fit config.json"),
    "more layers": (config_of(n_encoder_layers=3), "is missing"),
    "fewer layers": (config_of(n_encoder_layers=1), "is not the network's"),
    "a dilated backbone": (config_of(replace_final_stride_with_dilation=True), "dilation"),
    "other features": (config_of(input_features={"observation.tactile": {"type": "STATE", "shape": [3]}}), "tactile"),
    "no action": (config_of(output_features={}), "no output feature 'action'"),
    "another step": (step_of(registry_name="delta_action_processor"), "actions would be wrong"),
    "a file elsewhere": (step_of(state_file="../../secret.safetensors"), "expected a file beside it"),
    "no statistics": (step_of(state_file=None), "has no"),
    "another normalisation": (
        config_of(normalization_mapping={"STATE": "WHITEN", "ENV": "IDENTITY", "ACTION": "MIN_MAX"}),
        "expected one of",
    ),
    "a tensor too many": (weighed(lambda kept: kept.update({"model.more": np.zeros(1)})), "model.more is not"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors"),
}


@pytest.mark.parametrize("name", WRONG)
def test_settings_that_change_actions_are_refused_in_one_sentence(tmp_path, name):
    folder = checkpoint(tmp_path / "policy", "known")
    apply, why = WRONG[name]
    apply(folder)
    with pytest.raises((ValueError, OSError), match=why):
        lerobot(str(folder))


def test_a_pickle_beside_the_weights_is_never_read(tmp_path):
    folder = checkpoint(tmp_path, "known")
    (folder / "model.safetensors").rename(folder / "model.bin")
    (folder / "pytorch_model.bin").write_bytes(b"cposix\nsystem\n(S'false'\ntR.")
    with pytest.raises(OSError, match=r"model\.safetensors"):
        lerobot(str(folder))
