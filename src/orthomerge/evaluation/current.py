"""The merged encoder read by the expert's own head, unchanged: what every merging paper reports.

"Current Eval" of FT-Classifier and of MOMA (Eq. 11): logits g(x; theta_m) W_t^T + b_t.
"""

from dataclasses import dataclass
from typing import ClassVar

from orthomerge.evaluation.evidence import Evidence, Need
from orthomerge.models.heads import Head


@dataclass(frozen=True)
class Current:
    """Has no options and looks at nothing."""

    needs: ClassVar[frozenset[Need]] = frozenset()

    def build(self, evidence: Evidence) -> Head:
        return evidence.head
