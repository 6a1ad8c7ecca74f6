"""[robots.NAME], [dialects.NAME] and [panels.NAME]: what the gateway serves models as."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, JsonValue, model_validator

from jurybox.protocol.scoreboard import FIRST, LAST, NORMAL
from jurybox.server.settings.dialect_fields import PICKLED
from jurybox.server.settings.endpoints import check_host_port, check_listen
from jurybox.server.settings.robot_protocols import MODALITIES, MODALITY_FIELDS
from jurybox.server.settings.values import ModelName, Seconds, Strict


class RobotSettings(Strict):
    """[robots.NAME]: a port for robots, bound to a model. docs/operations.md describes each setting."""

    model: str
    speaks: Literal["openpi", "act", "gr00t", "lerobot"] = "openpi"
    listen: Annotated[str, AfterValidator(check_host_port)]
    clients: int = Field(default=64, ge=1, le=1024)
    timeout: Seconds = 60.0
    priority: Annotated[int, Field(ge=FIRST, le=LAST)] = NORMAL
    ping: Seconds = 20.0
    metadata: dict[str, JsonValue] = Field(default={})
    unprotected: bool = False
    like: Literal["n1.5", "n1.6"] = "n1.6"
    fps: float = Field(default=30.0, gt=0, le=10_000)

    @model_validator(mode="after")
    def _fits_together(self) -> RobotSettings:
        if self.speaks == "gr00t":
            for kind, fields in self.metadata.items():
                if kind not in MODALITIES or not isinstance(fields, dict) or not fields.keys() <= set(MODALITY_FIELDS):
                    raise ValueError(
                        f"metadata.{kind}: expected tables {', '.join(MODALITIES)} with {', '.join(MODALITY_FIELDS)}"
                    )
        return self


class DialectSettings(Strict):
    """[dialects.NAME]: a protocol of another project at /dialects/NAME, bound to a model; docs/dialects.md."""

    model: ModelName
    speaks: str | None = None
    inputs: dict[str, str] = Field(default={})
    output: str | None = None
    reward: str | None = None
    resize: list[Annotated[int, Field(ge=1, le=8192)]] = Field(default=[], max_length=2)
    timeout: Seconds = 100.0
    priority: Annotated[int, Field(ge=FIRST, le=LAST)] = NORMAL
    port: int | None = Field(default=None, ge=0, le=65535)
    host: Annotated[str, Field(min_length=1, max_length=255)] = "127.0.0.1"
    pickles_from_elsewhere: bool = False
    like: Literal["vllm", "sglang", "lmdeploy"] = "vllm"
    score_range: list[float] = Field(default=[], max_length=2)
    decimals: Annotated[int, Field(ge=0, le=9)] = 6

    @property
    def listen(self) -> str:
        """ "host:port" of its own port; empty if it has none."""
        if self.port is None:
            return ""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @model_validator(mode="after")
    def _fits_together(self) -> DialectSettings:
        check_listen(self.listen)
        if len(self.resize) == 1:
            raise ValueError(f"resize = {self.resize}, expected [height, width]")
        if self.score_range and not (len(self.score_range) == 2 and self.score_range[0] < self.score_range[1]):
            raise ValueError(f"score_range = {self.score_range}, expected [lowest, highest]")
        return self


# Settings that only some dialects use. To others they would promise what nothing does.
ONLY_OF = {
    **dict.fromkeys(("like", "decimals"), frozenset({"reward_model"})),
    "score_range": frozenset({"reward_model", "robometer"}),
    "pickles_from_elsewhere": PICKLED,
}


class MemberSettings(Strict):
    """One member of a panel: the weight of its score, and the model and output that the score comes from."""

    weight: float
    model: ModelName | None = None
    output: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _weight_alone(cls, given: Any) -> Any:
        is_weight = isinstance(given, (int, float)) and not isinstance(given, bool)
        return {"weight": float(given)} if is_weight else given

    def plain(self, name: str) -> dict[str, Any]:
        """Return the member as in the status document."""
        return {"weight": self.weight, "model": self.model or name, "output": self.output}


class PanelSettings(Strict):
    """[panels.NAME]: a juror whose score is the weighted sum of its members' scores; docs/dialects.md."""

    members: Annotated[dict[ModelName, MemberSettings], Field(min_length=1, max_length=32)]
