"""The base class of all trainings' settings, which are read from a TOML file and the command line.

A training declares its settings as fields of a subclass of `Settings`. Names are those of Stable-Baselines3 if it
has one: ``learning_rate``, ``gamma``, ``batch_size``, ``buffer_size``, ``learning_starts``, ``gradient_steps``,
``train_freq``, ``tau``, ``gae_lambda``, ``n_epochs``, ``ent_coef``, ``clip_range``.
"""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from jurybox.protocol.errors import did_you_mean
from jurybox.training.runtime.plan import ConfigError, refuse_unused

# Names of Stable-Baselines3, and then of other programs, for what has another name here.
SB3 = {
    "total_timesteps": "steps",
    "n_envs": "envs",
    "eval_freq": "evaluate_every",
    "n_eval_episodes": "evaluation_episodes",
    "save_freq": "checkpoint_every",
    "net_arch": "hidden",
    "lstm_hidden_size": "hidden_size",
}
OTHERS = {
    **SB3,
    "num_envs": "envs",
    "rnn_type": "recurrent",
    "use_lstm": "recurrent",
    "rnn_size": "hidden_size",
    "lstm_cell_size": "hidden_size",
    "n_workers": "workers",
    "num_workers": "workers",
    "lr": "learning_rate",
    "memory_size": "buffer_size",
    "buffer_capacity": "buffer_size",
    "discount": "gamma",
    "environment": "env",
    "world": "env_args",
    "frames": "n_stack",
    "mode": "publish_mode",
    "epsilon": "exploration_initial_eps",
    "target_network_update_interval": "target_update_interval",
    "red_agent": "red",
    "num_collectors": "workers",
    "n_collectors": "workers",
    "num_actors": "workers",
    "replay_size": "buffer_size",
    "replay_capacity": "buffer_size",
    "max_steps": "steps",
    "total_steps": "steps",
    "max_seconds": "seconds",
    "time_limit": "seconds",
    "warmup_steps": "learning_starts",
    "n_step": "n_steps",
    "max_staleness": "max_lag",
    "per": "prioritized",
    "per_alpha": "alpha",
    "per_beta": "beta",
    "weight_publish_interval": "publish_interval",
    "sync_interval": "weight_sync_interval",
    "eval_interval": "evaluate_every",
    "eval_games": "evaluation_games",
    "checkpoint_interval": "checkpoint_every",
    "save_interval": "checkpoint_every",
    "log_interval": "log_every",
}
WAYS = {
    "async_training": "actors and learners always run side by side; --serial runs them in one process",
    "verbose": "progress is always shown",
    "tensorboard_log": "TensorBoard files are always written to --out",
}

Compile = Annotated[
    Literal["auto", "always", "never"],
    Field(
        description="Compile the learner's updates to C++, on the CPU and without pictures; auto: in runs of 10,000 "
        "optimiser steps or more, where there is a compiler."
    ),
]
NOT_COMPILED = "only updates on the CPU are compiled"  # why `compile` has no effect


class Settings(BaseModel):
    """Settings of a training; a TOML file and the command line hold the same names.

    Class attributes:
        title: what an error calls them: "settings of the {title} training".
        may_change: what may be different when a run is resumed; None: everything may.
        ways: what a message says about names of others that are no setting of this training, by name.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    title: ClassVar[str] = ""
    may_change: ClassVar[Sequence[str] | None] = None
    ways: ClassVar[Mapping[str, str]] = {}

    seed: int = Field(0, ge=0, description="Seed of every random number generator.")

    @classmethod
    def others_names(cls) -> dict[str, str]:
        """Return the names that others, mostly Stable-Baselines3, have for settings of this training, and ours."""
        return {
            theirs: ours
            for theirs, ours in OTHERS.items()
            if ours in cls.model_fields and theirs not in cls.model_fields
        }

    @classmethod
    def other_way(cls, name: str) -> str | None:
        """Return how one gets here what a name of others stands for, where that is no single setting."""
        return None if name in cls.model_fields else {**WAYS, **cls.ways}.get(name)

    @classmethod
    def variant(cls, values: Mapping[str, Any]) -> type[Self]:
        """Return the class of settings of these values: which there are may depend on one of them.

        Raises:
            ConfigError: there is no such variant; the message says which there are.
        """
        return cls

    @classmethod
    def variants(cls, values: Mapping[str, Any]) -> Mapping[str, type[Self]]:
        """Return the variants that are shown together, and whose settings are flags, by what they are called."""
        return {"": cls}

    @classmethod
    def unknown(cls, name: str, table: Sequence[str] = ()) -> str:
        """Return what a message says about a name that is no setting: what it is called here, or what is near."""
        if not table and (way := cls.other_way(name)) is not None:
            return f"no such setting: {way}"
        if not table and name in (theirs := cls.others_names()):
            return f"no such setting: {name} is called {theirs[name]} here"
        return f"no such setting{did_you_mean(name, _names_in(cls, table))}"

    @model_validator(mode="before")
    @classmethod
    def _normalise(cls, given: Any) -> Any:
        """``part.NAME`` changes it alone: others stay the training's, not the class's."""
        if not isinstance(given, Mapping):
            return given
        values = dict(given)
        for name, field in cls.model_fields.items():
            part, default = given.get(name), field.default
            if isinstance(part, Mapping) and dataclasses.is_dataclass(default) and not isinstance(default, type):
                values[name] = merged(dataclasses.asdict(default), part)
        return values

    @classmethod
    def read(cls, path: Path | None, changes: Mapping[str, Any]) -> Self:
        """Read the settings of a TOML file (if there is one); `changes` override them.

        Raises:
            ConfigError: the file cannot be read, or a setting is unknown, out of its bounds or without effect.
        """
        try:
            text = path.read_text(encoding="utf-8") if path else ""
            values = merged(tomllib.loads(text), changes)
        except (OSError, ValueError) as error:  # text that is neither UTF-8 nor TOML is a ValueError
            raise ConfigError(f"{path} cannot be read: {error}; expected a TOML file") from error

        def place(key: Sequence[str]) -> str:
            found: Any = changes
            for part in key:
                found = found.get(part) if isinstance(found, Mapping) else None
            return "" if path is None or found is not None else f"{path}{_line_of(text, key)}: "

        settings = cls.checked(values, place)
        refuse_unused(flat_names(values), settings.unused())
        return settings

    @classmethod
    def checked(cls, values: Mapping[str, Any], place: Callable[[Sequence[str]], str] = lambda key: "") -> Self:
        """The settings of these names and values.

        Args:
            place: where a setting comes from, for messages: "train.toml:3: ".

        Raises:
            ConfigError: one is unknown or out of its bounds; the message names it.
        """
        found = cls.variant(values)
        try:
            return found(**values)
        except ValidationError as error:
            problems = []
            for each in error.errors():
                key, message = tuple(map(str, each["loc"])), each["msg"].removeprefix("Value error, ")
                if each["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
                    message = found.unknown(key[-1], key[:-1])
                problems.append(f"{place(key)}{': '.join(filter(None, ('.'.join(key), message)))}")
            raise ConfigError(f"settings of the {cls.title} training: {'; '.join(problems)}") from error

    def unused(self) -> Mapping[str, str]:
        """Settings that have no effect beside the others, and why; parts as ``part.NAME``."""
        return {}

    def changed(self, **changes: Any) -> Self:
        """A copy with other values, checked like the first; raises ConfigError as `checked` does."""
        values = {name: getattr(self, name) for name in self.model_fields_set}
        return self.checked({**values, **changes})

    def as_dict(self) -> dict[str, Any]:
        """Flat JSON values for settings.json, reports and trackers: parts as ``part.NAME``."""
        found: dict[str, Any] = {}
        for name, value in self.model_dump(mode="json").items():
            part = getattr(self, name)
            if isinstance(part, BaseModel) or dataclasses.is_dataclass(part):
                found |= {f"{name}.{inner}": each for inner, each in value.items()}
            else:
                found[name] = value
        return found


class ServedSettings(Settings):
    """Settings of a training whose policy a server can compute; `policy` says whether."""

    policy: Literal["local", "served"] = Field(
        "local", description="Where actions are computed: local (in the actors) or served (by a Jurybox server)."
    )
    server: str | None = Field(
        None, description="Address (ipc:// or grpc://) of the server of a served policy; none: a private server starts."
    )
    server_http: bool = Field(False, description="Serve HTTP from the private server, too, on a free port.")
    server_group: str | None = Field(
        None,
        min_length=1,
        max_length=64,
        description="Policies of one group and architecture on a server are computed as one forward; none: each alone.",
    )

    @field_validator("server")
    @classmethod
    def _is_an_address(cls, server: str | None) -> str | None:
        if server is not None and not server.startswith(("ipc://", "grpc://", "grpcs://")):
            raise ValueError(
                f'{server!r} is no address of a server that takes weights, expected "ipc:///path", "grpc://host:port" '
                'or "grpcs://host:port", such as "grpc://127.0.0.1:8001"'
            )
        return server

    def unused(self) -> dict[str, str]:
        unused: dict[str, str] = {}
        if self.policy == "local":
            unused |= dict.fromkeys(
                ("server", "server_http", "server_group"), 'policy is "local", so no server is asked'
            )
        elif self.server is not None:
            unused["server_http"] = "the server at `server` has a setting of its own for HTTP"
        return unused


class EnvironmentSettings(ServedSettings):
    """Settings of a training in environments of the user's."""

    build_once: bool = Field(
        False,
        description="Build each environment once, for its check, the training and evaluations, which break off an "
        "episode of the first worker; for a simulator on a fixed port.",
    )
    reset_timeout: float = Field(
        600.0, gt=0, description="Seconds that a reset of an environment, or building it, may take."
    )
    check_steps: int = Field(
        20, ge=0, description="Random steps that check an environment before the training; 0: none."
    )


def flat_names(values: Mapping[str, Any]) -> list[str]:
    """Names of settings, those of parts as ``part.NAME``."""
    names: list[str] = []
    for name, value in values.items():
        names += [f"{name}.{inner}" for inner in value] if isinstance(value, Mapping) else [name]
    return names


def changes_of(changes: Iterable[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of ``NAME=VALUE`` strings, then of options that were given (not None).

    A value that is not TOML is text, as for `jurybox serve`: a shell takes the quotes of ``device="cuda"``.

    Raises:
        ConfigError: a string is of another form.
    """
    changed: dict[str, Any] = {}
    for change in changes:
        changed = merged(changed, _change_of(change))
    for name, value in given.items():
        if value is not None:
            first, _, inner = name.partition(".")
            changed = merged(changed, {first: {inner: value} if inner else value})
    return changed


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two dicts of settings, nested tables included: ``learner.tau = 0.01`` changes that one alone."""
    found = dict(base)
    for name, value in changes.items():
        before = found.get(name)
        found[name] = merged(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return found


def _change_of(change: str) -> dict[str, Any]:
    """The setting of a ``NAME=VALUE`` string, as a nested dict. Raises ConfigError."""
    try:
        return tomllib.loads(change)
    except tomllib.TOMLDecodeError as error:
        # A quoted part of the name may contain an equals sign.
        match = re.fullmatch(r"""((?:[^"'=]|"[^"]*"|'[^']*')+)=(.*)""", change, re.DOTALL)
        try:
            if match is None:
                raise error
            return tomllib.loads(f"{match[1]} = {json.dumps(match[2].strip(), ensure_ascii=False)}")
        except tomllib.TOMLDecodeError:
            raise ConfigError(f"--set {change!r}: expected NAME=VALUE, such as seed=3 ({error})") from error


def _names_in(settings: Any, table: Sequence[str]) -> list[str]:
    """The names of the settings in a table of a settings class; empty if they are not known."""
    for part in table:
        fields: Mapping[str, Any] = getattr(settings, "model_fields", None) or get_type_hints(settings)
        found = fields.get(part)
        settings = getattr(found, "annotation", found)
    if isinstance(settings, type) and issubclass(settings, BaseModel):
        return list(settings.model_fields)
    return [field.name for field in dataclasses.fields(settings)] if dataclasses.is_dataclass(settings) else []


def _line_of(text: str, key: Sequence[str]) -> str:
    """The line that sets a key, as ":3"; empty if several lines, or none, could be it."""
    if not key:
        return ""
    name = re.escape(key[-1])
    named = re.compile(rf"""\s*(?:[\w"'-]+\s*\.\s*)*["']?{name}["']?\s*=|\s*\[\s*{name}\s*\]""")
    lines = [number for number, line in enumerate(text.splitlines(), 1) if named.match(line)]
    return f":{lines[0]}" if len(lines) == 1 else ""
