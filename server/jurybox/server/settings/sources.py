"""Sources of the settings (files, environment, command line), and error messages that name the source."""

from __future__ import annotations

import difflib
import re
import sys
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from jurybox.protocol.errors import did_you_mean

if sys.version_info >= (3, 11):  # engines also run with 3.10; they read no files
    import tomllib

_LONGEST_VALUE = 80

_WORDS = {
    "Input should be a valid dictionary": "expected a table",
    "Input should be a valid boolean": "expected true or false",
    "Input should be a valid integer": "expected an integer",
    "Input should be a valid ": "expected a ",
    "Input should be ": "expected ",
    "input was not a valid JSON value": "expected a string, number, boolean, list or table",
}


def problems(error: ValidationError, model: type[BaseModel], place: Callable[[Key], str]) -> list[str]:
    """Return one line for each validation error.

    Args:
        model: the settings class that was validated.
        place: returns the source of a key.
    """
    lines = []
    for detail in error.errors(include_url=False):
        key, message = tuple(map(str, detail["loc"])), detail["msg"]
        if not key:  # of a check across tables, whose message names them
            lines.append(f"{place(detail.get('ctx', {}).get('key', ()))}: {_expected(message)}")
        else:
            lines.append(_line(key, detail["type"], message, detail["input"], model, place))
    return lines


def _line(key: Key, kind: str, message: str, value: object, model: type[BaseModel], place: Callable[[Key], str]) -> str:
    if key[-1:] == ("[key]",):
        key = key[:-1]
        return f"{place(key)}: {shown(key)}: {_expected(message)}"
    at = f"{place(key)}: {shown(key)}"
    if kind == "extra_forbidden":
        return f"{at}: no such setting{_suggestion(key, model)}"
    if kind == "missing":
        return f"{at}: is missing"
    if isinstance(value, dict):  # an error of a whole table: its message names the values
        return f"{at}: {_expected(message)}"
    if key == ("server", "token"):
        return f"{at}: expected text"  # without the value, which may be a secret
    given = repr(value)
    given = given if len(given) <= _LONGEST_VALUE else f"{given[:_LONGEST_VALUE]}..."
    hint = ""
    if kind == "literal_error" and isinstance(value, str):
        choices = message.replace(" or ", ", ").removeprefix("Input should be ").split(", ")
        near = difflib.get_close_matches(value.lower(), [choice.strip("'") for choice in choices], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"{at} = {given}: {_expected(message)}{hint}"


def _suggestion(key: Key, model: type[BaseModel]) -> str:
    """Return what may have been meant by an unknown key: a name much like it in its table, or its place elsewhere."""
    *table, name = key
    known = _fields_at(model, table)
    if table == ["server"] and name in ("host", "port"):
        return '; expected http = "host:port", grpc = "host:port" or tcp = "host:port"'
    if not difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.75):
        tables = _tables(model) if table else [("server",)]  # [model] has no more to do with a dialect's `model`
        for other in tables:
            if name in _fields_at(model, other):
                return f"; it is a setting of [{shown(other)}]"
    return did_you_mean(name, known)


def _expected(message: str) -> str:
    """Return the text of a pydantic error as what was expected."""
    message = re.sub(r" or instance of \w+Settings$", "", message.removeprefix("Value error, "))
    for theirs, ours in _WORDS.items():
        message = message.replace(theirs, ours)
    return message


def _fields_at(model: type[BaseModel], table: Sequence[str]) -> list[str]:
    """Return the fields of the table at that key; empty if there is none."""
    found: type[BaseModel] = model
    parts = list(table)
    while parts:
        field = found.model_fields.get(parts.pop(0))
        inner = _settings_in(field.annotation) if field else None
        if inner is None:
            return []
        found = inner
        if inner is not field.annotation:  # type: ignore[union-attr]
            parts[:1] = []  # a dict of tables: skip the next part, which is a name
    return list(found.model_fields)


def _tables(model: type[BaseModel]) -> Iterator[tuple[str, ...]]:
    for name, field in model.model_fields.items():
        yield (name,) if _settings_in(field.annotation) is field.annotation else (name, "NAME")


def _settings_in(annotation: Any) -> type[BaseModel] | None:
    """Return the settings class X of X, X | None, or dict[str, X]."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in typing.get_args(annotation) if (found := _settings_in(part))), None)


# Sources of settings: a TOML file, environment variables and the command line, merged. The last one overrides.
#
# Each value keeps its place, which error messages name: "server.toml:7", "environment variable JURYBOX_HTTP",
# "--set server.http=...".
#
# pydantic-settings (2.16.3) is not used: it merges the same layers but keeps no places. For a file with max_batch =
# "many" and max_bach = 3 it names the keys, but neither the file nor the lines; for a wrong value it does not report
# that an environment variable gave it; and it silently accepts JURYBOX_HTP and JURYBOX_MAX_BATCH, which are no
# settings, even where extra values are forbidden. Most of this module tracks places; the merge itself is a few lines.


Key = tuple[str, ...]

# JURYBOX_ variables that are not settings of the server, each with its readers and its meaning.
RESERVED_VARIABLES: dict[str, str] = {
    "JURYBOX_SHM_DIR": "every process: the folder of shared memory instead of /dev/shm",
    "JURYBOX_SERVER_KEY": "clients: the public CURVE key of a tcp:// server, or a .key file with it",
    "JURYBOX_CLIENT_KEY": "clients: the .key_secret file with their own CURVE keys",
    "JURYBOX_TLS_CA": "clients: the certificate authority to trust for grpcs://, where it is not a public one",
    "JURYBOX_REVISION": "server: the source revision that /version and --version name, for builds without a .git",
}
# Kubernetes sets these in every container of a namespace that has a service called "jurybox"
# (kubernetes.io, "Accessing the Service": environment variables).
_SERVICE_LINK = re.compile(r"JURYBOX(_\w+)?_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)")
_KEY_PART = re.compile(r"""\s*(?:"([^"]*)"|'([^']*)'|([^."'\s=][^."'=]*?))\s*(\.|$)""")
_MODELS = "JURYBOX_MODELS__"


class InvalidConfig(Exception):
    """The configuration is invalid; the message names each wrong setting and what was expected."""


def parse_value(text: str) -> Any:
    """Parse the value of a variable or flag as TOML; text that is not TOML is a string."""
    try:
        parsed = tomllib.loads(f"value = {text}\n")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if parsed.keys() == {"value"} else text


def parse_key(text: str) -> Key:
    """Return the parts of a dotted key. A part with dots must be quoted.

    Raises:
        ValueError: the text is not a dotted key.
    """
    parts: list[str] = []
    position = 0
    while match := _KEY_PART.match(text, position):
        parts.append(next(group for group in match.groups()[:3] if group is not None))
        position = match.end()
        if match[4] == "":
            return tuple(parts)
    raise ValueError(f"{text!r} is no dotted key, expected such as models.photo.max_batch")


def shown(key: Key) -> str:
    """Return a key as it is written in TOML."""
    return ".".join(part if re.fullmatch(r"[\w-]+", part) else f'"{part}"' for part in key)


class Sources:
    """The merged settings, `tree`, and the place of each."""

    def __init__(self) -> None:
        self.tree: dict[str, Any] = {}
        self._places: dict[Key, str | None] = {}  # None: in the file; `place` looks up the line
        self._file = ""
        self._text = ""

    def place(self, key: Key) -> str:
        """Return the place of a setting, or of the innermost table around it that has one."""
        for length in range(len(key), 0, -1):
            if key[:length] in self._places:
                place = self._places[key[:length]]
                return place if place is not None else f"{self._file}:{_line_of(self._text, key[:length])}"
        return self._file or "configuration"

    def put(self, key: Key, value: Any, place: str | None) -> None:
        """Set a value, which overrides earlier ones.

        Raises:
            ConfigError: an earlier source gives a value where this key needs a table.
        """
        table = self.tree
        for length, part in enumerate(key[:-1], 1):
            table = table.setdefault(part, {})
            self._places.setdefault(key[:length], place)
            if not isinstance(table, dict):
                at = key[:length]
                raise InvalidConfig(f"{place}: {shown(at)} is {table!r} at {self.place(at)}, expected a table")
        table[key[-1]] = value
        for known in [known for known in self._places if known[: len(key)] == key]:
            del self._places[known]
        self._places[key] = place

    def add_file(self, path: Path, path_keys: Collection[str], server_path_keys: Collection[str] = ()) -> None:
        """Read a TOML file.

        Args:
            path_keys: settings of a model that are paths; they are relative to this file's folder.
            server_path_keys: the same for [server].

        Raises:
            ConfigError: the file cannot be read, or is not TOML.
        """
        try:
            self._text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise InvalidConfig(f"{path}: cannot be read: {error.strerror}; expected a TOML file") from error
        except UnicodeDecodeError as error:
            raise InvalidConfig(f"{path}: not UTF-8 text ({error.reason}); expected a TOML file") from error
        self._file = str(path)
        try:
            document = tomllib.loads(self._text)
        except tomllib.TOMLDecodeError as error:
            line = re.search(r"at line (\d+)", str(error))
            raise InvalidConfig(f"{path}{':' + line[1] if line else ''}: not TOML: {error}") from error
        self._add_table((), document)
        models = document.get("models")
        tables = [(model, path_keys) for model in (models.values() if isinstance(models, dict) else ())]
        for table, keys in [*tables, (document.get("server"), server_path_keys)]:
            for key in keys if isinstance(table, dict) else ():
                if isinstance(table.get(key), str):
                    table[key] = str(path.parent.absolute() / Path(table[key]).expanduser())

    def _add_table(self, key: Key, table: dict[str, Any]) -> None:
        for name, value in table.items():
            self._places[(*key, name)] = None
            if isinstance(value, dict):
                self._add_table((*key, name), value)
        if not key:
            self.tree = table

    def add_environment(
        self,
        environ: Mapping[str, str],
        server_keys: Collection[str],
        model_keys: Collection[str],
        more_models: Collection[str] = (),
    ) -> list[str]:
        """Read all JURYBOX_ variables: JURYBOX_KEY of [server], JURYBOX_MODELS__NAME__KEY of [models.NAME].

        Args:
            more_models: models that a later source names.

        Returns:
            What is wrong: a line for each variable that is not a setting.
        """
        server = {f"JURYBOX_{key.upper()}": key for key in server_keys}
        wrong = []
        for variable, text in sorted(environ.items()):
            if not variable.startswith("JURYBOX_") or variable in RESERVED_VARIABLES:
                continue
            place = f"environment variable {variable}"
            try:
                if variable in server:
                    # An empty address means the default one, as in the client; an empty http or grpc means off.
                    name = server[variable]
                    if text or name not in ("address", "token"):
                        self.put(("server", name), text if name == "token" else parse_value(text), place)
                elif variable.startswith(_MODELS):
                    models = self.tree.get("models")
                    known = {*(models if isinstance(models, dict) else ()), *more_models}
                    key = _model_key(variable, known, model_keys, environ)
                    self.put(key, parse_value(text), place)
                elif not _SERVICE_LINK.fullmatch(variable):
                    guess = f"JURYBOX_{variable.removeprefix('JURYBOX_SERVER').lstrip('_')}"
                    hint = (
                        f"; did you mean {guess!r}?"
                        if guess in server
                        else did_you_mean(variable, [*server, *RESERVED_VARIABLES])
                    )
                    raise InvalidConfig(
                        f"{place}: no such setting{hint} (a model's setting is JURYBOX_MODELS__NAME__KEY, "
                        "with two underscores between the parts)"
                    )
            except InvalidConfig as error:
                wrong.append(str(error))
        return wrong

    def add_flags(self, flags: Sequence[Flag]) -> list[str]:
        """Set the values of the command line; return what is wrong, a line for each flag."""
        models = self.tree.get("models")
        # A model may be defined by flags alone, but a misspelt name must not become one.
        named = {*(models if isinstance(models, dict) else ())}
        named |= {key[1] for key, _, _ in flags if key[0] == "models" and key[2] in ("factory", "exported")}
        wrong = []
        for key, value, place in flags:
            try:
                if key[0] == "models" and key[1] not in named:
                    raise InvalidConfig(f"{place}: no model {key[1]!r} is configured{did_you_mean(key[1], named)}")
                self.put(key, value, place)
            except InvalidConfig as error:
                wrong.append(str(error))
        return wrong


Flag = tuple[Key, Any, str]  # key, value and place


def parse_flags(
    sets: Sequence[str], tables: Collection[str], server_keys: Collection[str], model_keys: Collection[str]
) -> tuple[list[Flag], list[str]]:
    """Parse every --set.

    Args:
        tables: the tables of a configuration.

    Returns:
        The key, the value and the place of each, and a line for each that is wrong.
    """
    parsed, wrong = [], []
    for text in sets:
        try:
            parsed.append(_parse_flag(text, tables, server_keys, model_keys))
        except InvalidConfig as error:
            wrong.append(str(error))
    return parsed, wrong


def _parse_flag(text: str, tables: Collection[str], server_keys: Collection[str], model_keys: Collection[str]) -> Flag:
    if re.match(r"\s*[\"']?server[\"']?\s*\.\s*[\"']?token[\"']?\s*=", text):
        raise InvalidConfig(
            "--set server.token=...: a command line is there for every user of this host to read; set "
            "server.token_file, or the environment variable JURYBOX_TOKEN"
        )
    place = f"--set {text}"
    # A quoted part of the key may contain an equals sign.
    match = re.match(r"""((?:[^"'=]|"[^"]*"|'[^']*')*)=(.*)""", text, re.DOTALL)
    if match is None:
        raise InvalidConfig(f"{place}: expected KEY=VALUE, such as models.photo.max_batch=32")
    try:
        key = parse_key(match[1])
    except ValueError as error:
        raise InvalidConfig(f"{place}: {error}") from error
    if key[0] not in tables:
        whole = {name: f"models.NAME.{name}" for name in model_keys} | {name: f"server.{name}" for name in server_keys}
        whole |= {table: table for table in tables}
        near = difflib.get_close_matches(key[0].lower(), list(whole), n=1)
        hint = f"; did you mean {whole[near[0]]!r}?" if near else did_you_mean(key[0], tables)
        raise InvalidConfig(f"{place}: no such table {key[0]!r}{hint}")
    if len(key) < (2 if key[0] == "server" else 3):
        expected = "server.KEY=VALUE or models.NAME.KEY=VALUE"
        if key[0] not in ("server", "models"):
            expected = f"{key[0]}.NAME.KEY=VALUE"
        raise InvalidConfig(f"{place}: expected {expected}")
    return key, parse_value(match[2]), place


def _model_key(variable: str, known: Collection[str], model_keys: Collection[str], environ: Mapping[str, str]) -> Key:
    """Return the key that JURYBOX_MODELS__NAME__KEY names. Deeper parts (ARGS__HIDDEN) become lower case."""
    rest = variable.removeprefix(_MODELS)
    matching = [name for name in known if rest.startswith(_as_variable(name) + "__")]
    longest = max((len(name) for name in matching), default=0)
    matching = sorted(name for name in matching if len(name) == longest)
    if len(matching) > 1:
        raise InvalidConfig(
            f"environment variable {variable}: could be any of the models {', '.join(map(repr, matching))}; "
            "use --set or the file"
        )
    if matching:
        name, parts = matching[0], rest[longest + 2 :].split("__")
    else:
        part, *parts = rest.split("__")
        name = part.lower()
        # A model may be defined by variables alone, but a misspelt name must not become one.
        if not any(f"{_MODELS}{part}__{kind}" in environ for kind in ("FACTORY", "EXPORTED")):
            raise InvalidConfig(
                f"environment variable {variable}: no model {name!r} is configured" + did_you_mean(name, known)
            )
    if not parts or not all(parts):
        raise InvalidConfig(f"environment variable {variable}: expected JURYBOX_MODELS__NAME__KEY")
    if parts[0].lower() not in model_keys:
        raise InvalidConfig(
            f"environment variable {variable}: a model has no setting {parts[0].lower()!r}"
            + did_you_mean(parts[0], model_keys)
        )
    return ("models", name, *(part.lower() for part in parts))


def _as_variable(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]", "_", name).upper()


def _line_of(text: str, key: Key) -> int:
    """Return the line at which a TOML document sets `key`.

    tomllib keeps no positions. But the shortest prefix of the document that parses and contains the key ends with the
    statement that sets it, and that statement starts after the longest prefix that parses without the key.
    """
    lines = text.split("\n")
    start = 0
    for end in range(1, len(lines) + 1):
        try:
            found: Any = tomllib.loads("\n".join(lines[:end]) + "\n")
        except tomllib.TOMLDecodeError:
            continue
        for part in key:
            found = found.get(part) if isinstance(found, dict) else None
        if found is not None:
            return start + 1
        start = end
    return 1
