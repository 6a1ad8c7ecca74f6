import pytest

from jurybox.studies.photo.learning import ROLLOUT, steps_per_environment


def test_the_default_rollout_is_4000_steps():
    assert ROLLOUT == 4000
    assert steps_per_environment(8) == 500


@pytest.mark.parametrize("environments", [1, 2, 3, 6, 7, 8, 16, 31, 64, 100, 999, 4000])
def test_the_total_rollout_is_independent_of_the_number_of_environments(environments):
    total = steps_per_environment(environments) * environments
    assert abs(total - 4000) <= environments / 2


def test_a_rollout_of_ones_own_is_shared_out_too():
    assert steps_per_environment(8, 256) == 32


@pytest.mark.parametrize(("environments", "rollout"), [(0, 4000), (4, 0), (-1, 10)])
def test_nothing_to_share_is_refused(environments, rollout):
    with pytest.raises(ValueError, match="at least one"):
        steps_per_environment(environments, rollout)


def test_more_environments_than_steps_is_refused_with_a_way_out():
    with pytest.raises(ValueError, match="use fewer workers"):
        steps_per_environment(11, 10)
