"""Estimators and quantizers of anybody, judged: ``zosim check --estimator module:function`` and ``--quantizer module:function``.

``docs/how-to/judge-an-estimator.md`` says what is asked of them, and what each finding means.
"""

from proofs_checks.judging.estimators import GradientEstimator, judge_estimator
from proofs_checks.judging.findings import JudgedProperty, Judgement
from proofs_checks.judging.quantizers import Quantizer, judge_quantizer

__all__ = [
    "GradientEstimator",
    "JudgedProperty",
    "Judgement",
    "Quantizer",
    "judge_estimator",
    "judge_quantizer",
]
