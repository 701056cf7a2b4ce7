"""CamemBERT: RoBERTa's layout to the letter (`roberta.` prefix included), under classes of its own.

Martin et al. 2020, arXiv 1911.03894.
"""

from dataclasses import replace

from orthomerge.models import roberta

__all__ = ["FAMILY"]

FAMILY = replace(
    roberta.FAMILY,
    name="camembert",
    title="CamemBERT",
    model_types=("camembert",),
    encoder_class="CamembertModel",
    architecture="CamembertForSequenceClassification",
)
