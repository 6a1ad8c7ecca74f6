"""The server's configuration: all tables together, and how they are loaded."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PrivateAttr, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from jurybox.protocol.address import is_loopback
from jurybox.protocol.errors import Refused, did_you_mean
from jurybox.protocol.scoreboard import MAX_ENGINES, MAX_MODELS
from jurybox.server.security.access import FILES as _SECURITY_FILES
from jurybox.server.security.access import too_open
from jurybox.server.settings.dialect_fields import FIELDS, PICKLED
from jurybox.server.settings.door_settings import ONLY_OF, DialectSettings, PanelSettings, RobotSettings
from jurybox.server.settings.endpoints import split_host
from jurybox.server.settings.model_settings import EngineSettings, Holders, ModelSettings
from jurybox.server.settings.robot_protocols import WITHOUT_TLS, WITHOUT_TOKEN
from jurybox.server.settings.server_settings import ServerSettings
from jurybox.server.settings.sources import InvalidConfig, Sources, parse_flags, problems
from jurybox.server.settings.values import DialectName, ModelName, Strict

__all__ = [
    "Configuration",
    "InvalidConfig",
    "ModelSettings",
    "ServerSettings",
    "load_settings",
    "model_settings_from_json",
]

_FILES = ("exported", "weights")  # settings of a model that name files
_PATHS = (*_FILES, "save_dir", "python")  # settings of a model that are paths, existing or not

_EXAMPLE = """\
[models.photo]
factory = "jurybox.server.jurors:panel"\
"""


def _numbered(models: Any) -> Any:
    """Expand [models."NAME*"] with count = N to N models, the star replaced by 0 to N - 1."""
    if not isinstance(models, dict):
        return models
    result = {}
    for name, settings in models.items():
        count = settings.get("count") if isinstance(settings, dict) else None
        if ("*" in name) != (count is not None) or name.count("*") > 1:
            raise ValueError(f"expected count with a star in the name and the other way round, got {name!r}")
        if count is None:
            result[name] = settings
            continue
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MAX_MODELS:
            raise ValueError(f"count = {count!r} of {name!r}, expected 1 to {MAX_MODELS}")
        one = {key: value for key, value in settings.items() if key != "count"}
        several = {name.replace("*", str(number)): dict(one) for number in range(count)}
        if twice := sorted(several.keys() & (models.keys() | result.keys())):
            raise ValueError(f"{twice[0]!r} is named twice, by itself and by {name!r}")
        result |= several
    return result


def _wrong_table(message: str, *key: str) -> PydanticCustomError:
    """Return the error of a check across tables, for a validator to raise; `key` is the table that it names.

    pydantic reports the error of a validator of all settings without a key, so the error carries one.
    """
    return PydanticCustomError("wrong_table", "{message}", {"message": message, "key": key})


class Configuration(Strict):
    """All settings of a server."""

    server: ServerSettings = Field(default_factory=ServerSettings)
    models: Annotated[dict[ModelName, ModelSettings], BeforeValidator(_numbered)] = Field(
        default_factory=dict, max_length=MAX_MODELS
    )
    dialects: dict[DialectName, DialectSettings] = Field(default_factory=dict, max_length=100)

    panels: dict[ModelName, PanelSettings] = Field(default_factory=dict, max_length=100)

    _folder: str = PrivateAttr(default="")

    @property
    def folder(self) -> str:
        """The folder of the file that these settings come from; empty: there was none."""
        return self._folder

    @model_validator(mode="after")
    def _interpreters_agree(self) -> Configuration:
        """Check that models agree that share an engine: those of one group, and those of one interpreter."""
        groups: dict[str, tuple[str, str | None]] = {}
        for name, model in self.models.items():
            first, python = groups.setdefault(model.group or f" {name}", (name, model.python))
            if python != model.python:
                raise _wrong_table(
                    f"models {first!r} and {name!r} of group {model.group!r} have python = {python!r} and "
                    f"{model.python!r}: one engine computes a group, expected the same",
                    *("models", name),
                )
        for python in self.pythons():
            memory = {m.gpu_memory_fraction for m in self.models.values() if m.python == python} - {None}
            if len(memory) > 1:
                raise ValueError(
                    f"models of python = {python!r} have gpu_memory_fraction = {sorted(memory)}: they share an engine, "  # type: ignore[type-var]
                    "expected one number"
                )
        return self

    def pythons(self) -> list[str]:
        """Return the interpreters that models name."""
        return list(dict.fromkeys(model.python for model in self.models.values() if model.python))

    def engines(self) -> list[EngineSettings]:
        """Return all engines: the server's own, then for every other interpreter one on each device.

        Raises:
            Refused: these would be more engines than a server can have.
        """
        server = self.server
        own = server.engine_devices()
        engines = [EngineSettings(device, "", server.gpu_memory_fraction) for device in own]
        for python in self.pythons():
            given = (m.gpu_memory_fraction for m in self.models.values() if m.python == python)
            memory = next((one for one in given if one is not None), server.gpu_memory_fraction)
            engines += [EngineSettings(device, python, memory) for device in dict.fromkeys(own)]
        if len(engines) > MAX_ENGINES:
            raise Refused(
                f"{len(own)} engines, and those of {len(self.pythons())} other interpreters, make {len(engines)}, "
                f"expected at most {MAX_ENGINES}: name fewer server.devices"
            )
        return engines

    @model_validator(mode="after")
    def _panels_have_members(self) -> Configuration:
        for name, panel in self.panels.items():
            table = ("panels", name)
            if name in self.models:
                raise _wrong_table(f"[panels.{name}]: a model has that name, too", *table)
            if "score" in panel.members:
                raise _wrong_table(
                    f"[panels.{name}] has a member 'score', which is the total's name: expected another", *table
                )
            for member, one in panel.members.items():
                model = one.plain(member)["model"]
                if model not in self.models:
                    raise _wrong_table(
                        f"[panels.{name}] has the member {model!r}, which is no configured model", *table
                    )
        return self

    @model_validator(mode="after")
    def _dialects_can_be_spoken(self) -> Configuration:
        for name, dialect in self.dialects.items():
            speaks = dialect.speaks or name
            at, table = f"[dialects.{name}]", ("dialects", name)
            if speaks not in FIELDS:
                raise _wrong_table(f"{at} speaks {speaks!r}, expected speaks = one of {', '.join(FIELDS)}", *table)
            for setting, speakers in ONLY_OF.items():
                if setting in dialect.model_fields_set and speaks not in speakers:
                    raise _wrong_table(
                        f"{at} speaks {speaks!r}, which does not use {setting}: only {', '.join(sorted(speakers))} "
                        "does; remove it",
                        *(*table, setting),
                    )
            if dialect.model not in self.models and dialect.model not in self.panels:
                there = did_you_mean(dialect.model, [*self.models, *self.panels])
                raise _wrong_table(f"{at} is bound to model {dialect.model!r}, which is not configured{there}", *table)
            if not self.server.http and not dialect.listen:
                raise _wrong_table(
                    f"{at} is spoken over HTTP, expected server.http with it, or a port of its own", *table
                )
            for setting, where in (("server.http", self.server.http), (f"dialects.{name}.host", dialect.listen)):
                open_to_others = where and not is_loopback(split_host(where)[0])
                if speaks in PICKLED and open_to_others and not dialect.pickles_from_elsewhere:
                    raise _wrong_table(
                        f'{at} takes pickles, and {setting} = "{where}" is open to other hosts: expected a '
                        "loopback host, or pickles_from_elsewhere = true (they are read without being unpickled)",
                        *table,
                    )
        return self

    robots: dict[ModelName, RobotSettings] = Field(default_factory=dict, max_length=MAX_MODELS)

    @model_validator(mode="after")
    def _fits_together(self) -> Configuration:
        for name, robot in self.robots.items():
            if robot.model not in self.models:
                there = ", ".join(sorted(self.models)) or "none"
                raise _wrong_table(
                    f"robots.{name}.model = {robot.model!r} is not configured; there are: {there}", "robots", name
                )
            if robot.speaks in WITHOUT_TOKEN and self.server.guarded and not robot.unprotected:
                raise _wrong_table(
                    f"robots.{name}: clients of {robot.speaks!r} have neither token nor TLS, which server.token_file "
                    "and server.tls_cert require: expected unprotected = true, on a host that only robots reach",
                    "robots",
                    name,
                )
        robots = [robot.listen for robot in self.robots.values()]
        dialects = [dialect.listen for dialect in self.dialects.values()]
        taken = [*robots, *dialects, self.server.http, self.server.grpc, self.server.tcp]
        if twice := sorted({where for where in taken if where and split_host(where)[1] and taken.count(where) > 1}):
            raise ValueError(
                f"{twice[0]!r} is listened on twice, by robots or dialects among others: expected a port for each"
            )
        self._assign_lanes()
        return self

    def _assign_lanes(self) -> None:
        """Record for each model which dialects and robots keep a lane of it.

        Raises:
            ValueError: a model has too few rows for all of these lanes.
        """
        for model in self.models.values():
            model.keep_lanes_of(Holders())
        for name, dialect in self.dialects.items():
            panel = self.panels.get(dialect.model)
            members = panel.members if panel else {}
            asked = [one.plain(member)["model"] for member, one in members.items()] if panel else [dialect.model]
            for each in asked:
                self.models[each].holders.dialects.append(name)
        for name, robot in self.robots.items():
            self.models[robot.model].holders.robots[name] = robot.clients
        for name, model in self.models.items():
            if problem := model.holders.problem(name, model):
                raise _wrong_table(problem, "models", name)

    def open_transports(self) -> list[str]:
        """Return the transports that are open to other hosts without protection, each with the settings it lacks."""
        robots = {f"robots.{name}.listen": robot for name, robot in self.robots.items() if not robot.unprotected}
        plain = {name: robot.listen for name, robot in robots.items() if robot.speaks in WITHOUT_TLS}
        dialects = {f"dialects.{name}.host": dialect.listen for name, dialect in self.dialects.items()}
        secured = {name: robot.listen for name, robot in robots.items() if name not in plain}
        without = [
            f'{name} = "{where}": its clients have no TLS; use a tunnel to loopback, or set unprotected = true'
            for name, where in plain.items()
            if not is_loopback(split_host(where)[0])
        ]
        return [*self.server.open_transports(), *self.server.lacking({**secured, **dialects}), *without]

    def doors(self) -> dict[str, Any]:
        """Return where the server listens, as its "serving" line shows it."""
        dialects = {name: dialect.listen for name, dialect in self.dialects.items() if dialect.listen}
        robots = {name: robot.listen for name, robot in self.robots.items()}
        server = self.server
        return {"http": server.http, "grpc": server.grpc, "tcp": server.tcp, "robots": robots, "dialects": dialects}

    def plain_dialects(self) -> dict[str, dict[str, Any]]:
        """Return the dialects as JSON values for the gateway, with the weights of a panel's members."""
        return {
            name: {
                **dialect.model_dump(mode="json"),
                "members": {name: one.weight for name, one in panel.members.items()} if panel else {},
            }
            for name, dialect in self.dialects.items()
            for panel in [self.panels.get(dialect.model)]
        }

    def plain_panels(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Return the members of every panel as JSON values: weight, model and output by name."""
        return {
            name: {member: one.plain(member) for member, one in panel.members.items()}
            for name, panel in self.panels.items()
        }


def load_settings(
    path: Path | None, sets: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> Configuration:
    """Read settings. The command line overrides the environment, that the file, and that the defaults.

    Args:
        path: the TOML file, if there is one.
        sets: ``KEY=VALUE`` of every --set, in order.
        environ: the environment variables; None: those of this process.

    Raises:
        ConfigError: names every wrong setting with its source and what was expected there.
    """
    server_keys, model_keys = list(ServerSettings.model_fields), [*ModelSettings.model_fields, "count"]
    sources = Sources()
    if path is not None:
        sources.add_file(path, _PATHS, _SECURITY_FILES)
    flags, wrong = parse_flags(sets, list(Configuration.model_fields), server_keys, model_keys)
    from_flags = {key[1] for key, _, _ in flags if key[0] == "models"}
    wrong += sources.add_environment(os.environ if environ is None else environ, server_keys, model_keys, from_flags)
    wrong += sources.add_flags(flags)
    try:
        settings = Configuration.model_validate(sources.tree)
    except ValidationError as error:
        raise InvalidConfig("\n".join([*wrong, *problems(error, Configuration, sources.place)])) from error
    wrong += [
        f"{sources.place(('models', name, key))}: models.{name}.{key} = {file!r}: there is no such file"
        for name, model in settings.models.items()
        for key in _FILES
        if (file := getattr(model, key)) is not None and not Path(file).is_file()
    ]
    if wrong := [*wrong, *settings.server.broken_secrets()]:
        raise InvalidConfig("\n".join(wrong))
    if path is not None:
        settings._folder = str(path.parent.resolve())
    in_file = path is not None and settings.server.token and sources.place(("server", "token")).startswith(f"{path}:")
    if path is not None and in_file and (why := too_open(path)):
        raise InvalidConfig(f"server.token is in a file that others can read: {why}, or set server.token_file")
    return settings


def require_servable(settings: Configuration, *, insecure: bool) -> None:
    """Refuse a server without models, and one that other hosts can reach without authentication.

    Raises:
        ConfigError: no model is configured, a device does not exist, or other hosts could use the server without
            authentication and `insecure` is not set.
    """
    if not (settings.models or settings.server.factories or settings.server.remote_factories):
        raise InvalidConfig(f"no model is configured; expected at least one in the TOML file, such as\n\n{_EXAMPLE}\n")
    if missing := settings.server.missing_devices():
        raise InvalidConfig(missing)
    if (open_transports := settings.open_transports()) and not insecure:
        raise InvalidConfig(
            "\n".join(open_transports)
            + "\nOther hosts could use this server without authentication, or what they send could be read on the "
            "network. Expected these settings, or a loopback host; --insecure serves all the same, for a network that "
            "you trust (docs/security.md)"
        )


def model_settings_from_json(name: str, text: str, configured: ModelSettings | None = None) -> ModelSettings:
    """Return the settings of a model that a client loads, from a JSON object with the keys of [models.NAME].

    Args:
        configured: the configuration's settings of this model, whose dialects and robots keep their lanes of it.

    Raises:
        Refused: the settings are invalid; the message names what is wrong.
    """
    try:
        given: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Refused(f"settings of model {name!r} are not JSON: {error}") from error
    if "*" in name or (isinstance(given, dict) and "count" in given):
        raise Refused(f"{name!r} with a star, or count, stands for several models: load them one by one")
    try:
        model = Configuration.model_validate({"models": {name: given}}).models[name]
    except ValidationError as error:
        raise Refused("\n".join(problems(error, Configuration, lambda key: "load request"))) from error
    if configured is not None:
        model.keep_lanes_of(configured.holders)
        if problem := model.holders.problem(name, model):
            raise Refused(problem)
    return model
