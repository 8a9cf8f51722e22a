"""ZO2's table of the models' shapes, against the models' own configurations."""

from __future__ import annotations

from costmodel.models.configs import read_model_spec, shipped_config
from proofs_checks.claims import Checks, printed
from proofs_checks.exact import equal
from proofs_checks.outcomes import Context, Outcome, everything_holds
from proofs_checks.printed.cells import printed_table
from proofs_checks.printed.rows import wrong_cell

_QUANTITIES = {
    "num_hidden_layers": "config_layers",
    "num_attention_heads": "config_heads",
    "hidden_size": "config_hidden_dim",
}
"""What table 4 calls the keys of a configuration."""

_COLUMNS = {key: {"table": "ZO2 4", "quantity": quantity} for key, quantity in _QUANTITIES.items()}


def check_shapes(_context: Context) -> Outcome:
    """Compare printed layers, heads and widths with the models' own configurations, and parameters with the models' names."""
    parts = {}
    for name, cells in printed_table(_COLUMNS).items():
        config = shipped_config(name.lower())
        shape = [int(cells[key]["value"]) for key in _QUANTITIES]
        own = [config[key] for key in _QUANTITIES]
        parts[name] = equal(shape, own, what="layers, heads, width", tolerance=0.0)
        billions = read_model_spec(name.lower()).num_parameters / 1e9
        declared = float(name.removeprefix("OPT-").removesuffix("B"))
        parts[f"{name}, parameters"] = equal(billions, declared, what="billions", tolerance=0.025)
    return everything_holds(parts)


_CELLS = printed_table(_COLUMNS)

CHECKS: Checks = {
    "zo2-shapes-of-opt": printed(
        check_shapes,
        wrong_cell("a layer more", _CELLS["OPT-30B"]["num_hidden_layers"], "49"),
        wrong_cell("a head fewer", _CELLS["OPT-66B"]["num_attention_heads"], "71"),
    )
}
