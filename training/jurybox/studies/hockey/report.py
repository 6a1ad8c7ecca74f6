"""The report of a hockey training: result, curves, win matrix, timeline, and a film of a game."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from jurybox.studies.hockey.bots import BOTS
from jurybox.studies.hockey.drawing import film
from jurybox.studies.hockey.games import HockeyGames, Policy, Standing, evaluate
from jurybox.studies.hockey.opponents import Pool, actor_of
from jurybox.studies.hockey.rink import FPS
from jurybox.studies.hockey.settings import HockeyTraining
from jurybox.training.algorithms.acting import NumpyActor
from jurybox.training.checkpoints import read_state
from jurybox.training.film import save_film
from jurybox.training.report import charts, page
from jurybox.training.report.charts import Curve
from jurybox.training.report.page import Part, Picture, Section, Table
from jurybox.training.runtime.plan import End, Outcome

_AT_ONCE = 8  # games of the win matrix
_SNAPSHOTS = 4  # past selves in the win matrix
_SEED = 2_000_003  # makes the games of the matrix different from those of the training and its evaluations
_STYLES = {"weak": "learned", "strong": "reference"}
_FILM_WIDTH, _FILM_EVERY = 420, 2


def report(
    settings: HockeyTraining,
    outcome: Outcome,
    rows: Sequence[Mapping[str, float]],
    folder: Path,
    command: str,
) -> str:
    """Return the report as one HTML document; also write game.gif.

    After a signal no games are played, which may take a minute: whoever stops a run waits for its end.
    """
    actor = None if outcome.end is End.SIGNAL else learned(folder)
    sections: list[Section | None] = [
        Section("How it ended", [page.ended(outcome, "games"), *_standings(settings, outcome)]),
        *_games(settings, rows),
        page.return_curve(rows, "Return", "env steps", "return while exploring, 100 games"),
    ]
    if actor is not None and settings.matrix_games and not settings.build_once:
        names, opponents, points = win_matrix(settings, actor, Pool(folder / "pool"))
        drawn = charts.matrix(names, opponents, points, "points of each row's player against each column's")
        note = (
            f"Won minus lost, of {settings.matrix_games} games each without noise. The learned policy is the best "
            "evaluated one; the others are its past selves, after so many learner steps."
        )
        sections.append(Section("Results between players", [drawn], note))
    if not outcome.serial:
        sections.append(page.worked_when(folder / "timeline.json"))
    if actor is not None and settings.film_games and settings.env is None:
        film = _film(actor, settings.film_games, folder / "game.gif")
        sections.append(Section("A game", [film], "Left: the learned policy."))
    facts = {
        "Seed": settings.seed,
        "Games": f"{outcome.episodes:,} ({outcome.episodes / max(outcome.seconds, 1e-9):.1f}/s)",
        "Ahead": "neither side waits" if settings.free else f"collectors at most {settings.max_ahead:,} env steps",
        "Age of policies": age_of_policies(settings, outcome, rows),
    }
    sections.append(page.the_run(facts, settings.as_dict(), command, outcome, packages=("torch", "numpy", "box2d")))
    return page.render("Jurybox hockey report", "Jurybox: hockey", sections)


def age_of_policies(settings: HockeyTraining, outcome: Outcome, rows: Sequence[Mapping[str, float]]) -> str:
    """Return how far collectors' policies were behind the learner, and what limits that."""
    lags = [row["lag"] for row in rows if "lag" in row]
    found = f"{np.mean(lags):.1f} publications behind on average, {max(lags):.0f} at most; " if lags else ""
    limit = "no limit" if settings.max_lag is None else f"more than {settings.max_lag} are fetched before the next step"
    return (
        f"{found}{limit} ({outcome.forced_syncs:,} times); {outcome.learner_steps:,} learner steps were published "
        f"every {settings.publish_interval}"
    )


def learned(folder: Path) -> NumpyActor | None:
    """Return the policy of a run's best checkpoint, or of its newest one; None without a checkpoint."""
    checkpoints = folder / "checkpoints"
    found = [checkpoints / "best", *sorted(checkpoints.glob("step-*"), reverse=True)]
    paths = (checkpoint / "weights-policy.state" for checkpoint in found)
    path = next((path for path in paths if path.exists()), None)
    return None if path is None else actor_of(read_state(path)["state"])


def win_matrix(
    settings: HockeyTraining, actor: NumpyActor, pool: Pool
) -> tuple[list[str], list[str], list[list[Standing | None]]]:
    """Let the learned policy and some past selves play against each other and the bots.

    Returns:
        The names of the rows and of the columns, and the standings; None for a policy against itself.
    """
    kept = pool.names()
    some = [kept[i] for i in np.unique(np.linspace(0, len(kept) - 1, _SNAPSHOTS).round().astype(int))] if kept else []
    past = {f"at {int(name.removeprefix('pool:')) / 1000:.3g}k": pool.actor(name) for name in reversed(some)}
    actors = {"learned": actor, **past}
    games = HockeyGames(_AT_ONCE, settings.env, settings.mode)
    others: list[str | Policy] = [*actors.values(), *BOTS]
    rows = [
        [None if other is one else evaluate(games, one, other, settings.matrix_games, seed=_SEED) for other in others]
        for one in actors.values()
    ]
    games.close()
    return list(actors), [*actors, *BOTS], rows


def _standings(settings: HockeyTraining, outcome: Outcome) -> list[Part]:
    """Return a table of the newest evaluation."""
    rows = []
    for opponent in settings.league.anchors:
        numbers = [outcome.evaluation.get(f"eval_{what}_{opponent}") for what in ("wins", "ties", "losses")]
        if None not in numbers:
            rows.append([f"the {opponent} bot", *(f"{share:.1%}" for share in numbers)])
    heading = f"Against ({settings.evaluation_games} games without noise)"
    return [Table([heading, "Won", "Tied", "Lost"], rows)] if rows else []


def _games(settings: HockeyTraining, rows: Sequence[Mapping[str, float]]) -> list[Section | None]:
    """Return the charts of games won and lost in evaluations."""
    sections: list[Section | None] = []
    for what, outcome_word in (("wins", "won"), ("losses", "lost")):
        lines = []
        for opponent in settings.league.anchors:
            name = f"eval_{what}_{opponent}"
            points = [row for row in rows if name in row]
            if len(points) > 1:
                xs, ys = [row["env_steps"] for row in points], [100 * row[name] for row in points]
                lines.append(Curve(opponent, xs, ys, _STYLES.get(opponent, "plain")))
        if lines:
            title = f"share of games {outcome_word} against each bot over env steps"
            drawn = charts.curves(lines, title, "env steps", f"% of games {outcome_word}, without noise")
            sections.append(Section(f"Games {outcome_word}", [drawn]))
    return sections


def _film(actor: NumpyActor, games: int, path: Path) -> Picture:
    frames = film(
        actor,
        "strong",
        games=games,
        names=("learned", "strong"),
        width=_FILM_WIDTH,
        every=_FILM_EVERY,
    )
    save_film(frames, path, FPS / _FILM_EVERY)
    height, width = frames[0].shape[:2]
    return Picture.gif(path, width, height, "games of the learned policy against the strong bot")
