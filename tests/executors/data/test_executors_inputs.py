"""What a run reads beside its weights."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from executors.models.loading import load_config, load_model
from executors.runs.inputs import pad_token
from topology.errors import ModelError


@pytest.mark.parametrize("read", [load_config, load_model])
def test_a_name_whose_files_are_not_here_is_refused_in_words(read: Any) -> None:
    with pytest.raises(ModelError, match="cannot load the model nobody/has-this") as refusal:
        read("nobody/has-this")
    assert "--allow-download" in str(refusal.value.hint)


def test_the_padding_token_of_a_model_that_is_not_here_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for model, reason in (("opt-125m", "cannot load the model"), (str(tmp_path), "has no model_type")):
        run = SimpleNamespace(random_weights=False, model=model, allow_download=False)
        settings: Any = SimpleNamespace(run=run)
        with pytest.raises(ModelError, match=reason):
            pad_token(settings)
