"""Which code and which files a client may name for a model that it loads."""

from __future__ import annotations

from pathlib import Path

from jurybox.protocol.errors import Refused
from jurybox.server.settings.config import Configuration
from jurybox.server.settings.model_settings import ModelSettings

# The factories that come with Jurybox. Not all of its modules are allowed, since some of them start processes.
_OWN_FACTORIES = (
    "jurybox.server.jurors:*",
    "jurybox.training.algorithms.served_networks:*",
    "jurybox.studies.photo.network:*",
)
# The settings that a client on another host may give for its model: none that reads from disk or writes to it.
_FROM_ELSEWHERE = frozenset(
    {
        *("factory", "args", "max_batch", "min_batch", "max_wait_us", "rows", "lane_rows", "group"),
        *("publish", "keep_versions", "max_lag", "dtype", "channels_last", "cuda_graphs", "deterministic", "audit"),
        "parameters",
    }
)
LONGEST_KEEP = 3600.0  # seconds that a model may be kept without a request of the client that loaded it


def named_factories(settings: Configuration) -> list[str]:
    """Return the factories that the configuration names explicitly, without patterns."""
    named = [model.factory for model in settings.models.values() if model.factory]
    listed = (*settings.server.factories, *settings.server.remote_factories)
    return [*dict.fromkeys((*named, *(name for name in listed if not name.endswith(":*"))))]


def require_loadable_from_elsewhere(settings: Configuration, name: str, model: ModelSettings, keep: float) -> None:
    """Refuse a model of a client on another host that `server.remote_factories` does not allow.

    Raises:
        Refused: the message says which setting to add.
    """
    if unknown := sorted(model.model_fields_set - _FROM_ELSEWHERE):
        raise Refused(
            f"{unknown[0]} of model {name!r} is not taken from a network: expected some of {sorted(_FROM_ELSEWHERE)}"
        )
    module = str(model.factory).partition(":")[0]
    if not {str(model.factory), f"{module}:*"} & set(settings.server.remote_factories):
        raise Refused(
            f"factory {model.factory!r} of model {name!r} may not be loaded from another host. To allow it, add this "
            f'line to [server] of the server\'s configuration: remote_factories = ["{module}:*"], for all that this '
            f'module defines, or ["{model.factory}"]'
        )
    if not 0 < keep <= LONGEST_KEEP:
        raise Refused(
            f"keep = {keep:g} of model {name!r}: a model from another host is held for 1 to {LONGEST_KEEP:g} s, and "
            "longer while its client asks for it"
        )


def require_loadable(settings: Configuration, name: str, model: ModelSettings) -> None:
    """Refuse code that a client names unless the configuration allows it, since it runs as this user.

    Raises:
        Refused: the message says which setting to add.
    """
    if model.factory is not None:
        own = (*_OWN_FACTORIES, *settings.server.factories, *settings.server.remote_factories)
        allowed = {*named_factories(settings), *own}
        module = model.factory.partition(":")[0]
        if not allowed & {model.factory, f"{module}:*"}:
            raise Refused(
                f"factory {model.factory!r} of model {name!r} is not in the server's configuration, and clients may "
                f'not name other code. To allow it, set server.factories = ["{model.factory}"], or "{module}:*" '
                "for all that this module defines"
            )
    if model.exported is not None:
        file = Path(model.exported).resolve()
        there = [held.exported for held in settings.models.values() if held.exported]
        if not any({Path(entry).resolve()} & {file, *file.parents} for entry in (*there, *settings.server.exported)):
            raise Refused(
                f"exported {str(file)!r} of model {name!r} is not in the server's configuration, and clients may "
                f'not name other programs. To allow it, set server.exported = ["{file.parent}"], for all of that '
                "folder"
            )
