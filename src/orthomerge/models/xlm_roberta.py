"""XLM-RoBERTa: RoBERTa's layout to the letter (`roberta.` prefix included), under classes of its own.

Conneau et al. 2020, arXiv 1911.02116.
"""

from dataclasses import replace

from orthomerge.models import roberta

__all__ = ["FAMILY"]

FAMILY = replace(
    roberta.FAMILY,
    name="xlm_roberta",
    title="XLM-RoBERTa",
    model_types=("xlm-roberta",),
    encoder_class="XLMRobertaModel",
    architecture="XLMRobertaForSequenceClassification",
)
