"""`jurybox policy` and `jurybox edit`: list, play, evaluate, export, serve and use learned policies."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from jurybox.training.trainings.training import until_interrupted

if TYPE_CHECKING:
    from jurybox.training.policies import Policy

policy = typer.Typer(help="Use the policies of a run.", no_args_is_help=True, pretty_exceptions_enable=False)

Run = Annotated[
    Path, typer.Argument(metavar="RUN", help="Folder of a run or a checkpoint, or an exported .safetensors.")
]
Which = Annotated[str, typer.Option("--which", help="best, latest, or a checkpoint's number of env steps.")]
Name = Annotated[str | None, typer.Option("--name", help="Name of the policy, if the run has several.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of the first episode.")]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="NAME=VALUE", help="Set an argument of the environment, VALUE as TOML or text; repeatable."
    ),
]
Trust = Annotated[
    bool, typer.Option("--trust", help="Allow an exported file to name code to run; only for files that you trust.")
]


def _loaded(run: Path, which: str, name: str | None, *, trust: bool = False) -> Policy:
    from jurybox.training.policies import Policy, choose

    if (here := str(Path.cwd())) not in sys.path:
        # The plan's or the environment's module may be there, as for `train`. Appended, so that it shadows nothing.
        sys.path.append(here)
    return Policy(choose(run, which, name), trust=trust)


def _changes(sets: Sequence[str] | None) -> dict[str, Any]:
    from jurybox.training.runtime.settings import changes_of

    return changes_of(sets or [], {})


@policy.command("list")
def list_policies(run: Run) -> None:
    """List the policies of a run, with their env steps and evaluations."""

    def work(console: Console, resources: ExitStack) -> str:
        from jurybox.training.policies import policies

        lines = []
        for each in policies(run):
            steps = "exported" if each.env_steps is None else f"{each.env_steps:>12,} env steps"
            mark = "best" if each.best else "    "
            scores = "  ".join(f"{name} {value:.4g}" for name, value in each.numbers.items())
            lines.append(f"{mark}  {steps}  {each.name}  {each.where}{'  ' + scores if scores else ''}")
        return "\n".join(lines)

    until_interrupted(work, None, message="stopping", what="the list")


@policy.command("play")
def play_policy(
    run: Run,
    episodes: Annotated[int, typer.Option("--episodes", min=1)] = 1,
    video: Annotated[
        Path | None,
        typer.Option("--video", metavar="FILE", help="Record a video: .mp4, .webm, .gif; .png: a strip of frames."),
    ] = None,
    which: Which = "best",
    name: Name = None,
    seed: Seed = 0,
    sets: Sets = None,
    trust: Trust = False,
) -> None:
    """Play episodes and print their results."""

    def work(console: Console, resources: ExitStack) -> str:
        from jurybox.training.film import Film, check_film
        from jurybox.training.policies import PolicyError, play

        number = iter(range(1, episodes + 1))
        loaded, changes = _loaded(run, which, name, trust=trust), _changes(sets)
        film = None
        if video is not None:
            try:
                check_film(video)
            except ValueError as error:
                raise PolicyError(str(error)) from error
            with loaded.environment(changes):  # sets loaded.fps
                pass
            film = resources.enter_context(Film(video, loaded.fps))
        with resources:
            played = play(
                loaded,
                episodes,
                seed=seed,
                changes=changes,
                frame=film.add if film is not None else None,
                ended=lambda each: console.print(
                    f"episode {next(number)}: return {each.total:.4g}, {each.length} steps", highlight=False
                ),
            )
        mean = sum(each.total for each in played) / len(played)
        summary = f"mean return {mean:.4g} over {len(played)} episodes, {loaded.found.where}"
        return summary if video is None else f"{summary}\nfilm: {video}"

    until_interrupted(work, None, message="stopping", what="playing")


@policy.command("evaluate")
def evaluate_policy(
    run: Run,
    episodes: Annotated[int, typer.Option("--episodes", min=2)] = 200,
    which: Which = "best",
    name: Name = None,
    seed: Seed = 10_000,
    sets: Sets = None,
    trust: Trust = False,
) -> None:
    """Print the mean return with a 95 % confidence interval; episode i uses SEED + i. Exports include the result."""

    def work(console: Console, resources: ExitStack) -> str:
        from rich.progress import Progress

        from jurybox.training.policies import play, remember_score, score

        loaded, changes = _loaded(run, which, name, trust=trust), _changes(sets)
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("evaluating", total=episodes)
            played = play(loaded, episodes, seed=seed, changes=changes, ended=lambda each: progress.advance(task))
        scores = score(played)
        remember_score(loaded, run, {**scores, "seed": seed, "changes": changes, "which": which})
        return (
            f"mean return {scores['return_mean']:.4g} "
            f"(95 %: {scores['return_low']:.4g} to {scores['return_high']:.4g}), "
            f"deviation {scores['return_std']:.4g}, {episodes} episodes of {scores['length_mean']:.4g} steps, "
            f"{loaded.found.where}"
        )

    until_interrupted(work, None, message="stopping", what="the evaluation")


@policy.command("export")
def export_policy(
    run: Run,
    to: Annotated[Path, typer.Option("--to", metavar="NAME.pt2")] = Path("policy.pt2"),
    which: Which = "best",
    name: Name = None,
    trust: Trust = False,
) -> None:
    """Write NAME.pt2 (torch.export), NAME.safetensors (weights) and NAME.md (description)."""

    def work(console: Console, resources: ExitStack) -> str:
        from jurybox.training.policies import export

        return "\n".join(map(str, export(_loaded(run, which, name, trust=trust), to, run)))

    until_interrupted(work, None, message="stopping", what="the export")


@policy.command("serve")
def serve_policy(
    run: Run,
    model: Annotated[str, typer.Option("--model", help="Name of the model on the server.")] = "policy",
    address: Annotated[str | None, typer.Option("--address", help="Overrides server.address.")] = None,
    http: Annotated[str, typer.Option("--http", help="Overrides server.http.")] = "127.0.0.1:8000",
    grpc: Annotated[str, typer.Option("--grpc", help="Overrides server.grpc.")] = "127.0.0.1:8001",
    which: Which = "best",
    name: Name = None,
    trust: Trust = False,
) -> None:
    """Serve the policy to Jurybox and Open Inference Protocol clients, until stopped."""
    written: list[Path] = []

    def work(console: Console, resources: ExitStack) -> str:
        from jurybox.training.policies import served_config

        loaded = _loaded(run, which, name, trust=trust)
        folder = (run if run.is_dir() else run.parent) / "serving"
        server = {"http": http, "grpc": grpc, **({} if address is None else {"address": address})}
        written.append(served_config(loaded, folder, run, server, model))
        return f"starting a server for {loaded.found.where} as {model}; its configuration: {written[0]}"

    try:
        until_interrupted(work, None, message="stopping", what="serving")
    except typer.Exit as ended:
        if ended.exit_code or not written:
            raise
    import signal

    for number in (signal.SIGINT, signal.SIGTERM):  # an ignored signal would stay ignored in the server
        signal.signal(number, signal.SIG_DFL)
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "jurybox.server.cli", "serve", str(written[0])])


def edit(
    given: Annotated[
        list[Path], typer.Argument(metavar="IN...", help="Images (.jpg, .png), or folders of them.", exists=True)
    ],
    run: Annotated[
        Path, typer.Option("--policy", metavar="RUN", help="Folder of a photo training, or an exported policy.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Output folder for the edited images.")] = Path(
        "edited"
    ),
    which: Which = "latest",
    server: Annotated[
        str | None,
        typer.Option(
            "--server", help="Address of a server whose juror scores; without it the juror runs in this process."
        ),
    ] = None,
    sets: Sets = None,
    trust: Trust = False,
) -> None:
    """Edit images with a photo policy, at full resolution, and write a contact sheet of before and after."""

    def work(console: Console, resources: ExitStack) -> str:
        from jurybox.studies.photo.editing import SHEET, config_of, edit_pictures, pictures

        loaded, changes = _loaded(run, which, None, trust=trust), _changes(sets)
        changes |= {"scorer": "server", "address": server} if server is not None else {}
        config = config_of(loaded, changes)
        done = edit_pictures(
            pictures(given),
            loaded,
            out,
            config,
            lambda each: console.print(
                f"{each.source}: {each.before:.3f} to {each.after:.3f}, {each.target}", highlight=False, markup=False
            ),
            lambda why: console.print(f"passed over: {why}", highlight=False, markup=False),
        )
        gained = sum(each.after - each.before for each in done) / len(done)
        return f"{len(done)} pictures, scores {gained:+.3f} on average; side by side: {out / SHEET}"

    until_interrupted(work, out if out.is_dir() else None, message="stopping", what="editing")
