from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from tests.unit.studies.photo.test_photo_resume import trained

from jurybox.studies.photo import imitation
from jurybox.studies.photo.environment import PhotoConfig, PhotoLibrary, observation
from jurybox.studies.photo.environment.edits import TOOLS
from jurybox.studies.photo.imitation import Shown, imitate, learn, wanted
from jurybox.studies.photo.learning import PhotoTraining, _new_model, description, make_environments
from jurybox.training.checkpoints import write_state
from jurybox.training.policies import Policy, choose
from jurybox.training.runtime.plan import POLICY_FILE

SMALL = PhotoTraining(
    environment=PhotoConfig(scorer="local", juror="tests.unit.studies.photo.cheap_juror:middle_grey", tilted=0.5),
    seed=3,
    steps=8,
    imitation=160,
    envs=2,
    damages=2,
    rollout=8,
    n_epochs=1,
    batch_size=8,
    hidden=(32,),
)


class Recorded:
    """The environments' information about their photos."""

    def __init__(self, environments):
        self._environments, self.photos = environments, set()

    def __getattr__(self, name):
        return getattr(self._environments, name)

    def reset(self):
        told = self._environments.reset()
        self.photos |= {info["photo"] for info in self._environments.reset_infos}
        self.first = getattr(self, "first", 0) + len(told)
        return told

    def step(self, actions):
        told = self._environments.step(actions)
        self.photos |= {info["photo"] for info in told[3]}
        return told


def shown(steps=SMALL.imitation):
    torch.set_num_threads(1)
    environments = make_environments(SMALL, serial=True)
    model = _new_model(SMALL, environments)
    before = {name: tensor.clone() for name, tensor in model.policy.state_dict().items()}
    watched = Recorded(environments)
    found = imitate(model, watched, steps, seed=3, episode=4, check=lambda: None)
    environments.close()
    return model, found, before, watched


@pytest.fixture(scope="module")
def once():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(imitation, "_PASSES", 2)
        return shown()


def test_the_target_is_an_even_share_of_the_remaining_correction():
    damage = {"tilt": 6.0, "exposure": -1.6}
    seen = np.zeros(observation.SIZE, np.float32)
    seen[observation.TIME] = -1.0
    straighten, exposure = TOOLS.index("straighten"), TOOLS.index("exposure")
    first = wanted(seen, damage, 4)
    assert first[straighten] == pytest.approx(-6 / 2 / 4) and first[exposure] == pytest.approx(1.6 / 0.8 / 4, abs=0.03)
    seen[observation.TIME], seen[observation.EDITS.start + exposure] = 0.5, 2.0 / 3.0  # two stops, one step is left
    last = wanted(seen, damage, 4)
    assert last[straighten] == -1.0 and last[exposure] == pytest.approx(-0.4 / 0.8, abs=0.1)
    assert not wanted(np.zeros(observation.SIZE, np.float32), {}, 4).any(), "an intact photo is left alone"


def test_the_policy_imitates_shown_corrections(once):
    model, found, _, _ = once
    moves = np.stack([model.predict(row, deterministic=True)[0] for row in found.seen])
    assert ((moves - found.wanted) ** 2).mean() < 0.75 * (found.wanted**2).mean()


def test_the_mirrored_picture_is_turned_as_far_to_the_other_side(once):
    model, found, _, _ = once
    straighten = TOOLS.index("straighten")
    seen = found.seen[:64]
    moves, other = (model.predict(each, deterministic=True)[0] for each in (seen, observation.mirrored(seen)))
    assert np.abs(moves[:, straighten]).max() > 0.05
    np.testing.assert_allclose(other[:, straighten], -moves[:, straighten], atol=1e-6)
    # What looks the same in the mirror is not turned.
    alike = (seen + observation.mirrored(seen)) / 2
    assert np.abs(model.predict(alike, deterministic=True)[0][:, straighten]).max() < 1e-6


def test_straightening_depends_only_on_the_tilt_and_the_time(once):
    model, found, _, _ = once
    straighten = TOOLS.index("straighten")
    seen = found.seen[:8]
    elsewhere = seen.copy()
    elsewhere[:, observation.VIEW] = 0.1
    elsewhere[:, observation.SCORE] = -1.0
    elsewhere[:, observation.EDITS.start] = 0.7
    before, after = (model.policy.mlp_extractor.policy_net(torch.from_numpy(each)) for each in (seen, elsewhere))
    assert torch.equal(before[:, straighten], after[:, straighten])
    assert (before - after).abs().max() > 0.01


def test_exposure_and_white_balance_do_not_depend_on_the_view(once):
    model, found, _, _ = once
    light = [TOOLS.index(name) for name in ("exposure", "temperature", "tint")]
    seen = found.seen[:8]
    elsewhere = seen.copy()
    elsewhere[:, observation.VIEW] = 0.1
    before, after = (model.policy.mlp_extractor.policy_net(torch.from_numpy(each)) for each in (seen, elsewhere))
    assert torch.equal(before[:, light], after[:, light])
    assert (before - after)[:, TOOLS.index("contrast")].abs().max() > 0.001
    elsewhere[:, observation.NAMES.index("warm_stops_neutrals")] = 0.9
    after = model.policy.mlp_extractor.policy_net(torch.from_numpy(elsewhere))
    assert (before - after)[:, light].abs().min() > 0


def test_what_cannot_be_seen_is_left_alone_and_saturation_moved_a_little():
    environments = make_environments(SMALL, serial=True)
    model = _new_model(SMALL, environments)
    environments.close()
    seen, moves = np.zeros((200, observation.SIZE), np.float32), np.zeros((200, len(TOOLS)), np.float32)
    moves[::3] = 0.4  # a third is damaged, and nothing shows which
    torch.manual_seed(0)
    learn(model, Shown(seen, moves), 20)
    found = dict(zip(TOOLS, model.predict(seen[0], deterministic=True)[0].tolist(), strict=True))
    assert max(abs(found[name]) for name in ("exposure", "contrast", "temperature", "tint")) < 0.08
    assert 0.08 < found["saturation"] < 0.16


def test_the_saved_policy_acts_like_the_trained_one(once, tmp_path):
    model, found, _, _ = once
    checkpoint = tmp_path / "checkpoints" / "step-000000000008"
    checkpoint.mkdir(parents=True)
    state = {name: each.detach() for name, each in model.policy.mlp_extractor.policy_net.state_dict().items()}
    write_state(checkpoint / "weights-policy.state", {"state": state, "version": 1, "extra": {}})
    (checkpoint / POLICY_FILE).write_text(json.dumps(description(SMALL).as_dict()))
    policy = Policy(choose(checkpoint))
    np.testing.assert_allclose(policy(found.seen[:8]), model.predict(found.seen[:8], deterministic=True)[0], atol=1e-6)


def test_cures_are_shown_of_training_photos_alone(once):
    photos = once[3].photos
    library = PhotoLibrary.shipped()
    assert photos <= {photo.name for photo in library.training}
    assert not photos & {photo.name for photo in library.held_out}


def test_most_shown_pictures_are_first_ones_of_episodes_and_the_others_results_of_the_policy(once):
    _, found, _, watched = once
    assert watched.first > SMALL.imitation / 2
    first = found.seen[:, observation.TIME][:, 0] == -1.0
    assert 0.7 * len(first) < first.sum() < 0.95 * len(first)


def test_nothing_but_the_policy_is_shown_cures(once):
    model, _, before, _ = once
    changed = {name for name, tensor in model.policy.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed and all(name.startswith("mlp_extractor.policy_net") for name in changed)


def test_the_same_seed_shows_the_same(monkeypatch):
    monkeypatch.setattr(imitation, "_LAST_PASSES", imitation._PASSES)
    model, found, _, _ = shown(steps=8)
    again, other, _, _ = shown(steps=8)
    assert np.array_equal(found.seen, other.seen) and np.array_equal(found.wanted, other.wanted)
    for name, tensor in model.policy.state_dict().items():
        assert torch.equal(tensor, again.policy.state_dict()[name]), name


def test_a_training_is_shown_cures_once_and_not_when_it_is_resumed(tmp_path, monkeypatch):
    from jurybox.studies.photo import learning as photo

    asked = []

    def imitated(*_, **named):
        asked.append(named["seed"])
        return Shown(np.zeros((0, observation.SIZE)), np.zeros((0, len(TOOLS))))

    monkeypatch.setattr(photo, "imitate", imitated)
    trained(tmp_path / "run", SMALL)
    trained(tmp_path / "run", SMALL.changed(steps=16), resume=True)
    assert asked == [3]
