"""A module's weights by their names: their digest, and files of weights for modules of which parts are compiled."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.unit.engine.test_loaded_models import Plus, loaded  # noqa: F401  a fixture

from jurybox.server.engine.model_code import Loaded, LoadError, digest


def test_a_digest_is_that_of_names_dtypes_shapes_and_bytes_in_the_order_of_names() -> None:
    module = torch.nn.Module()
    matrix = torch.arange(6.0).reshape(2, 3)
    module.register_buffer("steps", torch.tensor(7))
    module.register_buffer("brief", torch.ones(2, dtype=torch.bfloat16))
    module.register_buffer("across", matrix.T)
    module.register_buffer("unsaved", torch.ones(1), persistent=False)
    expected = hashlib.sha256()
    for text, array in (
        ("across|torch.float32|[3, 2]|", np.ascontiguousarray(matrix.numpy().T)),
        ("brief|torch.bfloat16|[2]|", np.array([0x3F80, 0x3F80], np.uint16)),
        ("steps|torch.int64|[]|", np.array(7)),
    ):
        expected.update(text.encode())
        expected.update(array.tobytes())
    assert digest(module) == expected.hexdigest()[:16]


class Extra(Plus):
    """Has a state beside its tensors."""

    def get_extra_state(self) -> dict[str, int]:
        return {"steps": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


@pytest.mark.parametrize("name", ["inner.bias", "inner._orig_mod.bias"])
def test_a_file_of_weights_fits_a_module_whose_parts_are_compiled_and_keeps_its_other_state(
    loaded: Callable[..., Loaded],  # noqa: F811
    tmp_path: Path,
    name: str,
) -> None:
    module = torch.nn.Module()
    module.inner = torch.nn.Module()
    module.inner._orig_mod = Extra(4)  # as torch.compile wraps it
    save_file({name: torch.full((4,), 5.0)}, tmp_path / "w.safetensors")
    found = loaded(module, weights=str(tmp_path / "w.safetensors"), publish="double_buffer")
    assert module.inner._orig_mod.bias.tolist() == [5.0] * 4 and module.inner._orig_mod.steps == 3
    assert found.layout is not None and list(found.layout.places) == ["inner.bias"]


def test_a_file_with_a_weight_too_many_is_refused_by_its_name(
    loaded: Callable[..., Loaded],  # noqa: F811
    tmp_path: Path,
) -> None:
    save_file({"bias": torch.ones(4), "more": torch.ones(4)}, tmp_path / "w.safetensors")
    with pytest.raises(LoadError, match=r"(?s)does not fit the module: .*more"):
        loaded(Plus(4), weights=str(tmp_path / "w.safetensors"))


def test_publications_of_weights_that_are_no_tensors_are_refused_and_other_state_is_none_of_them(
    loaded: Callable[..., Loaded],  # noqa: F811
) -> None:
    class Packed(Plus):
        def _save_to_state_dict(self, destination: dict[str, object], prefix: str, keep_vars: bool) -> None:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination[f"{prefix}packed"] = (1, 2)

    with pytest.raises(LoadError, match=r"models\.m\.publish: its weights 'packed' are a tuple and no tensors"):
        loaded(Packed(4), publish="double_buffer")
    layout = loaded(Extra(4), publish="double_buffer").layout
    assert layout is not None and list(layout.places) == ["bias"]
    assert loaded(Packed(4)).layout is None
