"""Making games: this package's, or another environment by its name."""

from __future__ import annotations

from jurybox.training.environments.hockey.game import Game, HockeyGame, Mode, TimeOut


def make_game(
    environment: str | None = None,
    mode: Mode | int = Mode.NORMAL,
    *,
    keep: bool = True,
    time_out: TimeOut = "truncate",
    seed: int | None = None,
) -> Game:
    """A game of two.

    Args:
        environment: None for `HockeyGame`; ``module:Class`` for an environment with the original's interface, such as
            ``hockey.hockey_env:HockeyEnv`` where that is installed.
    """
    if environment is None:
        return HockeyGame(mode, keep=keep, time_out=time_out, seed=seed)
    from jurybox.training.environments.hockey.original import OriginalGame

    return OriginalGame.of(environment, mode, keep=keep, time_out=time_out, seed=seed)
