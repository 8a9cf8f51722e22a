"""Estimators and quantizers of anybody, judged: ``zosim check --estimator module:function`` and ``--quantizer module:function``.

``docs/judging.md`` says what is asked of them, and what each finding means.
"""

from proofs_checks.judging.estimators import Estimator, judge_estimator
from proofs_checks.judging.findings import Finding, Judgement
from proofs_checks.judging.quantizers import Quantizer, judge_quantizer

__all__ = ["Estimator", "Finding", "Judgement", "Quantizer", "judge_estimator", "judge_quantizer"]
