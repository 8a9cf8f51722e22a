"""Values that options of ``zosim run`` and ``replay`` may have."""

from __future__ import annotations

import enum

ResidencyName = enum.StrEnum("ResidencyName", {"RESIDENT": "resident", "OFFLOADED": "offloaded"})
MethodName = enum.StrEnum(
    "MethodName",
    {
        "AUTO": "auto",
        "MEZO": "mezo",
        "ZO2": "zo2",
        "PERTP": "pertp",
        "DDP": "ddp",
        "TWO_D": "2d",
        "SPARQ": "sparq",
    },
)
TransfersName = enum.StrEnum("TransfersName", {"PRIVATE": "private", "SHARED": "shared", "SLICED": "sliced"})
ShareGroupName = enum.StrEnum("ShareGroupName", {"HOST": "host", "WORLD": "world"})
TraversalName = enum.StrEnum(
    "TraversalName", {"SWEEP": "sweep", "BLOCKWISE": "blockwise", "QUERYWISE": "querywise"}
)
UpdateName = enum.StrEnum("UpdateName", {"IMMEDIATE": "immediate", "DELAYED": "delayed"})
RngName = enum.StrEnum("RngName", {"MEZO": "mezo", "COUNTER": "counter"})
OrderName = enum.StrEnum("OrderName", {"REGISTRATION": "registration", "EXECUTION": "execution"})
WeightsName = enum.StrEnum("WeightsName", {"SERIAL": "serial", "COPIES": "copies"})
DirectionName = enum.StrEnum("DirectionName", {"GAUSSIAN": "gaussian", "RADEMACHER": "rademacher"})
DifferenceName = enum.StrEnum("DifferenceName", {"CENTRAL": "central", "FORWARD": "forward"})
ScheduleName = enum.StrEnum("ScheduleName", {"CONSTANT": "constant", "LINEAR": "linear", "COSINE": "cosine"})
Switch = enum.StrEnum("Switch", {"ON": "on", "OFF": "off"})
TaskName = enum.StrEnum(
    "TaskName", {"AUTO": "auto", "CHOICE": "choice", "PERPLEXITY": "perplexity", "GENERATION": "generation"}
)
LossFormat = enum.StrEnum("LossFormat", {"MODEL": "model", "FP64": "fp64"})
AttentionName = enum.StrEnum("AttentionName", {"EAGER": "eager", "SDPA": "sdpa"})
