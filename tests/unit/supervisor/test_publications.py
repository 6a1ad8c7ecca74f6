"""The rate at which weights are published."""

from jurybox.server.supervisor.models import PublicationRate


def test_the_rate_is_that_of_the_last_ten_seconds():
    rate = PublicationRate()
    rate.look(5, 0.0)
    assert rate.per_second == 0.0
    for second in range(1, 61):
        rate.look(5 + 4 * second, float(second))
    assert rate.per_second == 4.0
    for second in range(61, 80):
        rate.look(245, float(second))
    assert rate.per_second == 0.0


def test_another_channel_begins_anew():
    rate = PublicationRate()
    rate.look(100, 0.0)
    rate.look(2, 1.0)
    assert rate.per_second == 0.0
    rate.look(4, 2.0)
    assert rate.per_second == 2.0
